"""Where the chunks of a column are: small pieces of its bytes, each with a digest of its own.

The bytes of a column are blocks: one for each member, or one for each layer and member where layers come first. A
block is cut into chunks of whole rows; a chunk never crosses a block, so a member's rows are whole chunks wherever
they lie. Pure arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from storage.columns import DTYPES, ColumnSpec

CHUNK_ROWS = 512
MIN_CHUNK_BYTES = 4 << 10
MAX_CHUNK_BYTES = 32 << 10
WINDOW_BYTES = 1 << 20
"""Most bytes of one run, but for a chunk that is larger by itself."""


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

    def chunks(self, content: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Number and bytes of each chunk in `content`, all bytes of the run."""
        start = 0
        for number, size in enumerate(self.chunk_bytes, self.first_chunk):
            yield number, content[start : start + size]
            start += size


@dataclass(frozen=True)
class ChunkLayout:
    """Where the blocks and chunks of a column are."""

    num_layers: int
    """1 where rows come first."""
    row_bytes: int
    """Of one row, in one layer."""
    row_offsets: Sequence[int]
    rows_per_chunk: int

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

    @cached_property
    def _chunks_before(self) -> list[int]:
        """[members + 1] chunks of one layer before each member."""
        rows = [stop - start for start, stop in pairwise(self.row_offsets)]
        counts = [math.ceil(number / self.rows_per_chunk) if self.row_bytes else 0 for number in rows]
        return [0, *accumulate(counts)]

    @property
    def num_chunks(self) -> int:
        return self.num_layers * self._chunks_before[-1]

    @property
    def num_bytes(self) -> int:
        return self.num_layers * self.row_offsets[-1] * self.row_bytes

    def num_rows(self, member: int) -> int:
        return self.row_offsets[member + 1] - self.row_offsets[member]

    def rows(self, layers: range, member: int, rows: range) -> Iterator[Run]:
        """What to read for some rows of a member in `layers`, layer by layer."""
        if not rows or not self.row_bytes:
            return
        first, last = rows.start // self.rows_per_chunk, math.ceil(rows.stop / self.rows_per_chunk)
        step = max(1, WINDOW_BYTES // (self.rows_per_chunk * self.row_bytes))
        for layer in layers:
            for chunk in range(first, last, step):
                yield self._run(layer, member, range(chunk, min(chunk + step, last)), rows)

    def chunks(self, content: memoryview) -> list[memoryview]:
        """All chunks of the column `content`, in the order of its bytes."""
        step = self.rows_per_chunk * self.row_bytes
        blocks = [(stop - start) * self.row_bytes for start, stop in pairwise(self.row_offsets)]
        found: list[memoryview] = []
        start = 0
        for num_bytes in blocks * self.num_layers:
            stop = start + num_bytes
            while start + step < stop:
                found.append(content[start : start + step])
                start += step
            if num_bytes:
                found.append(content[start:stop])
            start = stop
        return found

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
