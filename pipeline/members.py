"""A planned sample together with the place of its rows in the pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pipeline.planner import PlannedSample
from storage.columns import Array
from storage.refs import GroupRef


class RowSource(Protocol):
    """The part of a pool that a rank needs."""

    def read_rows(self, ref: GroupRef, column: str, member: int, start: int = 0, stop: int | None = None) -> Array: ...
    def num_rows(self, ref: GroupRef, column: str, member: int) -> int: ...
    def read_layers(
        self, ref: GroupRef, column: str, member: int, layers: range, start: int = 0, stop: int | None = None
    ) -> Array: ...


@dataclass(frozen=True)
class StoredMember:
    """Reads one sample's rows. Raises `CorruptDataError` or `StorageError`."""

    pool: RowSource
    ref: GroupRef
    """Its group."""
    sample: PlannedSample

    def rows(self, column: str, num_rows: int | None = None) -> Array:
        """The first `num_rows` of a column, all of them without a number: [num_rows, ...]."""
        return self.pool.read_rows(self.ref, column, self.sample.member, 0, num_rows)

    def layers(self, column: str, layers: range, start: int, stop: int) -> Array:
        """Rows `start:stop` in some layers of a column whose layers come first: [L, stop - start, ...]."""
        return self.pool.read_layers(self.ref, column, self.sample.member, layers, start, stop)

    def num_rows(self, column: str) -> int:
        """Rows of this sample in a column."""
        return self.pool.num_rows(self.ref, column, self.sample.member)

    def has(self, column: str) -> bool:
        """Whether there are rows of this sample in a column."""
        return self.num_rows(column) > 0
