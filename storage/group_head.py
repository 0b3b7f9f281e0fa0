"""The first record of a group: header, table of chunk digests and, for a small group, all its columns."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from vime.errors import CorruptDataError

_ARRAY_OF_3 = b"\x93"
_BINARY = struct.Struct(">cI")
_BINARY_32 = b"\xc6"


class GroupHead(msgspec.Struct, frozen=True, array_like=True):
    """The first record of a group."""

    header: bytes
    table: bytes
    """Of the chunk digests."""
    columns: memoryview = memoryview(b"")
    """All columns of a small group, one after the other. Readers of older layouts pass over them and then refuse the
    table's version."""


def head_alone(header: bytes, table: bytes) -> bytes:
    """The record of a group whose columns are in the records after it."""
    return msgspec.msgpack.encode([header, table])


def head_with_columns(header: bytes, table: bytes, columns: Sequence[memoryview]) -> bytes:
    """The record of a whole group. The columns, given by their stored bytes, are copied once."""
    binary = _BINARY.pack(_BINARY_32, sum(map(len, columns)))
    return b"".join([_ARRAY_OF_3, msgspec.msgpack.encode(header), msgspec.msgpack.encode(table), binary, *columns])


def read_head(data: bytes) -> GroupHead:
    """The first record of a group; its columns are a view of `data`. Raises `CorruptDataError`."""
    try:
        return msgspec.msgpack.decode(data, type=GroupHead)
    except msgspec.MsgspecError as error:
        raise CorruptDataError(f"The head of a group, {len(data)} bytes, can't be read: {error}.") from error
