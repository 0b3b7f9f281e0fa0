"""Prompt tasks as bytes: what a producer reads when it has leased a group."""

from __future__ import annotations

import msgspec

from storage.values import pack, unpack_extension
from vime.data.cursor import PromptTask
from vime.errors import CorruptDataError, SchemaVersionError

SCHEMA_VERSION = 1


def encode_prompt(task: PromptTask) -> bytes:
    """The task as msgpack. Raises `SampleError` naming the path of a value that can't be stored."""
    fields = {name: pack(value, name) for name, value in msgspec.structs.asdict(task).items()}
    return msgspec.msgpack.encode({"schema_version": SCHEMA_VERSION, **fields})


def decode_prompt(data: bytes) -> PromptTask:
    """Inverse of `encode_prompt`. Raises `CorruptDataError` or `SchemaVersionError`."""
    try:
        fields = msgspec.msgpack.decode(data, type=dict[str, object], ext_hook=unpack_extension)
        version = fields.pop("schema_version", None)
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise SchemaVersionError(f"A prompt has schema version {version}, this code reads up to {SCHEMA_VERSION}.")
        return PromptTask(**fields)  # type: ignore[arg-type]
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError) as error:
        raise CorruptDataError(f"A prompt of {len(data)} bytes can't be read: {error}.") from error
