"""Positions of accepted groups: global over all segments of a queue, and sets of them that stay small."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

SEGMENT_SPAN = 2**40
"""The group that segment s was the n-th to accept (both from 0) has position s * SEGMENT_SPAN + n."""


class PositionRanges:
    """A set of positions, kept as sorted ranges: its size follows the number of gaps, not of positions."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        """From (first, last) ranges in any order; they may overlap."""
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        self._count = 0
        for first, last in ranges:
            self.add(first, last)

    @classmethod
    def of(cls, positions: Iterable[int]) -> PositionRanges:
        """The set of these positions."""
        result = cls()
        result.update(positions)
        return result

    def add(self, first: int, last: int) -> None:
        """Add all positions from `first` to `last`, both included."""
        low = bisect_right(self._lasts, first - 2)  # the first range that ends at first - 1 or later
        high = bisect_right(self._firsts, last + 1)  # past the last range that begins at last + 1 or earlier
        replaced = slice(low, high)
        if low < high:
            first, last = min(first, self._firsts[low]), max(last, self._lasts[high - 1])
        self._count += last - first + 1
        self._count -= sum(
            end - begin + 1 for begin, end in zip(self._firsts[replaced], self._lasts[replaced], strict=True)
        )
        self._firsts[replaced], self._lasts[replaced] = [first], [last]

    def update(self, positions: Iterable[int]) -> None:
        """Add positions one by one."""
        for position in positions:
            self.add(position, position)

    def ranges(self) -> list[tuple[int, int]]:
        """Sorted (first, last) ranges, as few as possible."""
        return list(zip(self._firsts, self._lasts, strict=True))

    def minus(self, other: PositionRanges) -> PositionRanges:
        """The positions of this set that are not in `other`."""
        result = PositionRanges()
        for first, last in self.ranges():
            for cut_first, cut_last in other.ranges_between(first, last):
                if first < cut_first:
                    result.add(first, cut_first - 1)
                first = cut_last + 1
            if first <= last:
                result.add(first, last)
        return result

    def ranges_between(self, first: int, last: int) -> list[tuple[int, int]]:
        """The ranges that have a position from `first` to `last`, both included; whole, also beyond these."""
        low, high = bisect_right(self._lasts, first - 1), bisect_right(self._firsts, last)
        return list(zip(self._firsts[low:high], self._lasts[low:high], strict=True))

    def count_between(self, first: int, last: int) -> int:
        """How many positions from `first` to `last`, both included, are in the set."""
        return sum(min(end, last) - max(begin, first) + 1 for begin, end in self.ranges_between(first, last))

    def __contains__(self, position: int) -> bool:
        index = bisect_right(self._firsts, position) - 1
        return index >= 0 and position <= self._lasts[index]

    def __len__(self) -> int:
        return self._count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PositionRanges) and self.ranges() == other.ranges()

    __hash__ = None  # type: ignore[assignment]  # mutable


def segment_of(position: int) -> int:
    """Index of the segment that accepted a position."""
    return position // SEGMENT_SPAN


def first_position(segment: int) -> int:
    """The first position of a segment."""
    return segment * SEGMENT_SPAN
