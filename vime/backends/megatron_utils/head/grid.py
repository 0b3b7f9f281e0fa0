"""The logits matrix [R, V] as blocks that are small enough to exist, and single entries of it by block."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Grid:
    """Blocks of at most `chunk_rows` x `tile_columns` that cover `num_rows` x `num_columns`."""

    num_rows: int
    num_columns: int
    chunk_rows: int
    tile_columns: int

    @property
    def num_chunks(self) -> int:
        return math.ceil(self.num_rows / self.chunk_rows)

    @property
    def num_tiles(self) -> int:
        return math.ceil(self.num_columns / self.tile_columns)

    def tiles(self) -> Iterator[tuple[int, slice]]:
        """(number, columns) of each tile."""
        for number in range(self.num_tiles):
            begin = number * self.tile_columns
            yield number, slice(begin, min(begin + self.tile_columns, self.num_columns))

    def chunks(self) -> Iterator[tuple[int, slice]]:
        """(number, rows) of each chunk."""
        for number in range(self.num_chunks):
            begin = number * self.chunk_rows
            yield number, slice(begin, min(begin + self.chunk_rows, self.num_rows))


class GridEntries:
    """Entries (row, column) of the matrix, grouped by the block that holds them; each is visited once in all."""

    def __init__(self, grid: Grid, rows: torch.Tensor, columns: torch.Tensor, inside: torch.Tensor) -> None:
        """`rows` and `columns` [E] int64; those that aren't `inside` [E] (bool) belong to no block."""
        kept = inside.nonzero()[:, 0]
        rows, columns = rows[kept], columns[kept]
        tiles = columns.div(grid.tile_columns, rounding_mode="floor")
        blocks = tiles * grid.num_chunks + rows.div(grid.chunk_rows, rounding_mode="floor")
        order = blocks.argsort(stable=True)
        widths = (grid.num_columns - tiles * grid.tile_columns).clamp(max=grid.tile_columns)
        places = (rows % grid.chunk_rows) * widths + columns % grid.tile_columns
        self._numbers, self._places = kept[order], places[order]
        counts = torch.bincount(blocks, minlength=grid.num_tiles * grid.num_chunks)
        self._edges = [0, *counts.cumsum(0).tolist()]
        self._num_chunks = grid.num_chunks

    def of_block(self, tile: int, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(numbers of the entries [e], their places in the flattened block [e])."""
        block = tile * self._num_chunks + chunk
        part = slice(self._edges[block], self._edges[block + 1])
        return self._numbers[part], self._places[part]
