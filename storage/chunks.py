"""Digests of the chunks of a group's columns, so that a reader checks exactly the bytes that it touches.

The table of a group's digests lies in the first record, with the header. A small group is one record, which is read
and checked as a whole, and has no digests of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import xxhash

from storage.chunk_layout import ChunkLayout, Run
from storage.columns import Array, ColumnSpec
from vime.errors import CorruptDataError, SchemaVersionError

TABLE_VERSION = 3
DIGEST_BYTES = 8


class ColumnDigests(msgspec.Struct, frozen=True):
    """XXH3-64 of each chunk of one column, in the order of the bytes. They guard against damage, not against malice."""

    rows_per_chunk: int
    digests: bytes

    def digest(self, chunk: int) -> bytes:
        """What the bytes of chunk number `chunk` must have."""
        return self.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]

    def first_bad_chunk(self, run: Run, content: memoryview) -> int | None:
        """Number of the first chunk in `content`, all bytes of `run`, that differs from its digest."""
        return next((number for number, chunk in run.chunks(content) if digest_of(chunk) != self.digest(number)), None)

    def check(self, what: str, layout: ChunkLayout) -> None:
        """Raise `CorruptDataError` when these can't be the digests of a column in that layout."""
        if len(self.digests) != layout.num_chunks * DIGEST_BYTES:
            raise CorruptDataError(
                f"{what} has {len(self.digests)} bytes of digests; expected {layout.num_chunks * DIGEST_BYTES} for its "
                f"{layout.num_bytes} bytes."
            )


class ChunkTable(msgspec.Struct, frozen=True):
    """The digests of a group's columns by name, and where the columns are."""

    version: int
    columns: dict[str, ColumnDigests]
    records: list[int]
    """How many of the columns, in order, are in each record after the first; none (since version 3) when all are in the
    first, where they have no digests."""


def digest_of(content: memoryview) -> bytes:
    """The digest of one chunk."""
    return xxhash.xxh3_64_digest(content)


def chunk_table(specs: Sequence[ColumnSpec], contents: Mapping[str, memoryview], records: list[int]) -> bytes:
    """The digests of a group's columns, given by their stored bytes, and how they are shared out among `records`."""
    table = {}
    for spec in specs:
        layout = ChunkLayout.of(spec)
        digests = b"".join(map(digest_of, layout.chunks(contents[spec.name])))
        table[spec.name] = ColumnDigests(layout.rows_per_chunk, digests)
    return msgspec.msgpack.encode(ChunkTable(TABLE_VERSION, table, records))


def no_chunk_table() -> bytes:
    """The table of a group that is one record."""
    return msgspec.msgpack.encode(ChunkTable(TABLE_VERSION, {}, []))


def read_chunk_table(data: bytes) -> ChunkTable:
    """Inverse of `chunk_table` and `no_chunk_table`. Raises `SchemaVersionError` or `CorruptDataError`."""
    try:
        table = msgspec.msgpack.decode(data, type=ChunkTable)
    except msgspec.MsgspecError as error:
        raise CorruptDataError(f"A table of chunk digests of {len(data)} bytes can't be read: {error}.") from error
    if table.version > TABLE_VERSION:
        raise SchemaVersionError(
            f"A table of chunk digests has version {table.version}, this code reads up to {TABLE_VERSION}.",
            next_step="Update vime to the version that wrote the pool.",
        )
    return table


def column_bytes(array: Array) -> memoryview:
    """The stored bytes of a column: C order, little-endian."""
    flat = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1)
    return flat.view(np.uint8).data
