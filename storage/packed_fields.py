"""Everything of a sample that is not a number a token, as bytes: a column of small fields, and one for each kind of
media.

A reader of tokens never touches them. Media that several members have, as those of their prompt, are stored once: the
others' rows are the number of the first member, which is shorter than any media.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from storage.column_rows import Array, ColumnRows, optional_column, place
from storage.values import pack, unpack_extension
from vime.errors import CorruptDataError, SampleError
from vime.utils.types import Sample

FIELDS = "fields"
MEDIA = ("multimodal_inputs", "multimodal_train_inputs")
"""Columns and fields of the same name."""

_MAX_NUMBER_BYTES = 5
"""Of a member's number as msgpack; media are a map with a name as its key."""
_DEFAULTS = Sample().to_dict()
_decoder = msgspec.msgpack.Decoder(dict[str, Any], ext_hook=unpack_extension)


def packed_columns(samples: Sequence[Sample], not_packed: frozenset[str]) -> list[ColumnRows]:
    """uint8 columns: `fields` with all attributes but the media and `not_packed`, and those of `MEDIA`.

    The loss mask of a removed sample is packed, because its column holds zeros. Raises `SampleError` naming the
    sample and the path of a value that can't be stored.
    """
    columns = [ColumnRows(FIELDS, "uint8", [_rows(_pack_fields(sample, not_packed)) for sample in samples], [])]
    for name in MEDIA:
        columns += optional_column(name, "uint8", samples, list(_media_rows(samples, name)))
    return columns


def first_with_same_media(rows: Array) -> int | None:
    """The member that holds what a member's rows of a media column stand for; None when they are the media."""
    if len(rows) > _MAX_NUMBER_BYTES:
        return None
    try:
        return msgspec.msgpack.decode(rows.tobytes(), type=int)
    except msgspec.MsgspecError as error:
        raise CorruptDataError(f"The {len(rows)} bytes of a sample's media can't be read: {error}.") from error


def unpack_member(columns: Mapping[str, Array]) -> Sample:
    """The sample of one member's rows of the packed columns. Raises `CorruptDataError`."""
    values: dict[str, Any] = {}
    try:
        for name in (FIELDS, *MEDIA):
            if name in columns and len(columns[name]):
                values |= _decoder.decode(columns[name].tobytes())
        return Sample.from_dict(values)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, TypeError) as error:
        raise CorruptDataError(f"The fields of a sample can't be read: {error}.") from error


def _media_rows(samples: Sequence[Sample], name: str) -> Iterator[Array | None]:
    """Each member's rows of a media column; an object that members share is packed once."""
    packed: dict[int, bytes] = {}
    first_with: dict[bytes, int] = {}
    for member, sample in enumerate(samples):
        value = vars(sample)[name]
        if value is None:
            yield None
            continue
        if id(value) not in packed:
            packed[id(value)] = _packed(sample, {name: value})
        content = packed[id(value)]
        first = first_with.setdefault(content, member)
        yield _rows(content if first == member else msgspec.msgpack.encode(first))


def _pack_fields(sample: Sample, not_packed: frozenset[str]) -> bytes:
    values = {
        name: value
        for name, value in sorted(sample.to_dict().items())
        if name not in not_packed and name not in MEDIA and not _is_default(name, value)
    }
    if sample.remove_sample and sample.loss_mask is not None:
        values["loss_mask"] = sample.loss_mask
    return _packed(sample, values)


def _is_default(name: str, value: object) -> bool:
    """Left out, because reading gives it back."""
    default = _DEFAULTS.get(name, ...)
    return type(value) is type(default) and bool(value == default)


def _packed(sample: Sample, values: Mapping[str, object]) -> bytes:
    try:
        packed = {name: pack(value, name) for name, value in values.items()}
    except SampleError as error:
        raise SampleError(
            f"{place(sample)}: {error.message}", next_step=error.next_step, reason=error.reason
        ) from error
    return msgspec.msgpack.encode(packed)


def _rows(content: bytes) -> Array:
    return np.frombuffer(content, np.uint8)
