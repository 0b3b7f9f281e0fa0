from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from storage.positions import SEGMENT_SPAN, PositionRanges, first_position, segment_of

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 8)).map(lambda pair: (pair[0], pair[0] + pair[1])))


@given(RANGES, st.integers(0, 70), st.integers(0, 70))
def test_ranges_behave_as_the_set_of_their_positions(ranges: list[tuple[int, int]], a: int, b: int) -> None:
    positions = {position for first, last in ranges for position in range(first, last + 1)}
    found = PositionRanges(ranges)
    assert len(found) == len(positions)
    assert {position for position in range(80) if position in found} == positions
    assert found.count_between(min(a, b), max(a, b)) == len(positions & set(range(min(a, b), max(a, b) + 1)))
    assert all(first <= last for first, last in found.ranges())
    assert all(left[1] + 1 < right[0] for left, right in itertools.pairwise(found.ranges()))
    assert PositionRanges.of(positions) == found


def test_a_long_history_is_one_range_a_segment() -> None:
    positions = PositionRanges()
    for segment in range(3):
        positions.update(range(first_position(segment), first_position(segment) + 1000))
    assert positions.ranges() == [(s * SEGMENT_SPAN, s * SEGMENT_SPAN + 999) for s in range(3)]
    assert [segment_of(first) for first, _ in positions.ranges()] == [0, 1, 2]


def test_nothing_lies_between_ends_that_are_swapped() -> None:
    assert PositionRanges([(0, 5)]).count_between(3, 2) == 0


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)))
def test_minus_is_the_difference_of_the_sets(left: set[int], right: set[int]) -> None:
    assert PositionRanges.of(left).minus(PositionRanges.of(right)) == PositionRanges.of(left - right)
