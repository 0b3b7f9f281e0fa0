"""Digests of pieces of a column, so that a reader checks exactly the bytes that it touches.

The bytes of a column are blocks: one for each member, or one for each layer and member where layers come first. A
block is cut into chunks of whole rows; a chunk never crosses a block, so a member's rows are whole chunks wherever
they lie. The table of a group's digests is a record of its own beside the columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import msgspec
import numpy as np
import xxhash

from storage.columns import DTYPES, Array, ColumnSpec
from vime.errors import CorruptDataError, SchemaVersionError

TABLE_VERSION = 1
DIGEST_BYTES = 8
CHUNK_ROWS = 512
MIN_CHUNK_BYTES = 4 << 10
MAX_CHUNK_BYTES = 64 << 10
WINDOW_BYTES = 1 << 20
"""Most bytes of one run, but for a chunk that is larger by itself."""


def digest_of(content: memoryview) -> bytes:
    """XXH3-64: guards against damage, not against malice."""
    return xxhash.xxh3_64_digest(content)


class ColumnDigests(msgspec.Struct, frozen=True):
    """Digests of one column, one a chunk, in the order of the bytes."""

    rows_per_chunk: int
    digests: bytes


class ChunkTable(msgspec.Struct, frozen=True):
    """What the record of a group's digests says, by name of the column."""

    version: int
    columns: dict[str, ColumnDigests]


@dataclass(frozen=True)
class Run:
    """Whole chunks that lie next to each other in a column, and which bytes of them are wanted."""

    offset: int
    """First byte in the column."""
    chunk_bytes: list[int]
    first_chunk: int
    """Number of the first chunk in the column's digests."""
    skip: int
    """Bytes before the wanted ones."""
    take: int
    """Wanted bytes."""

    @cached_property
    def num_bytes(self) -> int:
        return sum(self.chunk_bytes)

    def first_bad_chunk(self, content: memoryview, digests: bytes) -> int | None:
        """Number of the first chunk in `content` (all bytes of the run) that differs from its digest."""
        start = 0
        for number, size in enumerate(self.chunk_bytes, self.first_chunk):
            known = digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
            if digest_of(content[start : start + size]) != known:
                return number
            start += size
        return None


@dataclass(frozen=True)
class ChunkLayout:
    """Where the blocks and chunks of a column are."""

    num_layers: int
    """1 where rows come first."""
    row_bytes: int
    """Of one row, in one layer."""
    row_offsets: Sequence[int]
    rows_per_chunk: int
    _chunks_before: list[int] = field(init=False)
    """[members + 1] chunks of one layer before each member."""

    def __post_init__(self) -> None:
        rows = [stop - start for start, stop in pairwise(self.row_offsets)]
        counts = [math.ceil(number / self.rows_per_chunk) for number in rows]
        object.__setattr__(self, "_chunks_before", [0, *accumulate(counts)])

    @classmethod
    def of(cls, spec: ColumnSpec, rows_per_chunk: int | None = None) -> ChunkLayout:
        """Layout of a column; without `rows_per_chunk` a new column's."""
        axis = spec.row_axis
        row_bytes = math.prod(spec.shape[axis + 1 :]) * np.dtype(DTYPES[spec.dtype]).itemsize
        num_layers = spec.shape[0] if axis == 1 else 1
        return cls(num_layers, row_bytes, spec.row_offsets, rows_per_chunk or _rows_per_chunk(row_bytes))

    @property
    def num_members(self) -> int:
        return len(self.row_offsets) - 1

    @property
    def num_chunks(self) -> int:
        return self.num_layers * self._chunks_before[-1]

    @property
    def num_bytes(self) -> int:
        return self.num_layers * self.row_offsets[-1] * self.row_bytes

    def check(self, what: str, num_bytes: int, digests: bytes) -> None:
        """Raise `CorruptDataError` when a column of so many bytes, or its digests, can't have this layout."""
        if num_bytes != self.num_bytes or len(digests) != self.num_chunks * DIGEST_BYTES:
            raise CorruptDataError(
                f"{what} has {num_bytes} bytes and {len(digests)} bytes of digests; "
                f"expected {self.num_bytes} and {self.num_chunks * DIGEST_BYTES}."
            )

    def num_rows(self, member: int) -> int:
        return self.row_offsets[member + 1] - self.row_offsets[member]

    def rows(self, layers: range, member: int, rows: range) -> Iterator[Run]:
        """What to read for some rows of a member in `layers`, layer by layer."""
        if not rows:
            return
        first, last = rows.start // self.rows_per_chunk, math.ceil(rows.stop / self.rows_per_chunk)
        step = max(1, WINDOW_BYTES // max(1, self.rows_per_chunk * self.row_bytes))
        for layer in layers:
            for chunk in range(first, last, step):
                yield self._run(layer, member, range(chunk, min(chunk + step, last)), rows)

    def everything(self) -> Iterator[Run]:
        """What to read for the whole column."""
        for layer in range(self.num_layers):
            for member in range(self.num_members):
                yield from self.rows(range(layer, layer + 1), member, range(self.num_rows(member)))

    def _run(self, layer: int, member: int, chunks: range, rows: range) -> Run:
        last_row = self.num_rows(member)
        edges = [min(chunk * self.rows_per_chunk, last_row) for chunk in (*chunks, chunks.stop)]
        before = layer * self.row_offsets[-1] + self.row_offsets[member]
        wanted = max(rows.start, edges[0]), min(rows.stop, edges[-1])
        return Run(
            offset=(before + edges[0]) * self.row_bytes,
            chunk_bytes=[(end - begin) * self.row_bytes for begin, end in pairwise(edges)],
            first_chunk=layer * self._chunks_before[-1] + self._chunks_before[member] + chunks.start,
            skip=(wanted[0] - edges[0]) * self.row_bytes,
            take=(wanted[1] - wanted[0]) * self.row_bytes,
        )


def joined(runs: Iterable[Run]) -> Iterator[Run]:
    """The same runs, those together that lie next to each other in file and result, up to `WINDOW_BYTES`."""
    waiting: list[Run] = []
    num_bytes = 0
    for run in runs:
        if waiting and (num_bytes + run.num_bytes > WINDOW_BYTES or not _continues(waiting[-1], run)):
            yield _one(waiting)
            waiting, num_bytes = [], 0
        waiting.append(run)
        num_bytes += run.num_bytes
    if waiting:
        yield _one(waiting)


def chunk_table(specs: Sequence[ColumnSpec], columns: Mapping[str, Array]) -> bytes:
    """The record of the digests of a group's columns."""
    table = {}
    for spec in specs:
        layout = ChunkLayout.of(spec)
        content = column_bytes(columns[spec.name])
        digests = []
        for run in layout.everything():
            start = run.offset
            for size in run.chunk_bytes:
                digests.append(digest_of(content[start : start + size]))
                start += size
        table[spec.name] = ColumnDigests(layout.rows_per_chunk, b"".join(digests))
    return msgspec.msgpack.encode(ChunkTable(TABLE_VERSION, table))


def read_chunk_table(data: bytes) -> ChunkTable:
    """Inverse of `chunk_table`. Raises `SchemaVersionError` or `CorruptDataError`."""
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


def _rows_per_chunk(row_bytes: int) -> int:
    num_bytes = min(max(CHUNK_ROWS * row_bytes, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)
    return max(1, num_bytes // max(1, row_bytes))


def _continues(before: Run, run: Run) -> bool:
    return (
        before.offset + before.num_bytes == run.offset
        and before.first_chunk + len(before.chunk_bytes) == run.first_chunk
        and before.skip + before.take == before.num_bytes
        and run.skip == 0
    )


def _one(runs: Sequence[Run]) -> Run:
    first = runs[0]
    chunk_bytes = [size for run in runs for size in run.chunk_bytes]
    return Run(first.offset, chunk_bytes, first.first_chunk, first.skip, sum(run.take for run in runs))
