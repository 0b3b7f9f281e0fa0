"""Sequence packing: nothing lost, limits kept, ranks equal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.packing import deal_to_ranks, pack_by_tokens, split_evenly

LENGTHS = st.lists(st.integers(1, 300), min_size=4, max_size=60).map(lambda values: dict(enumerate(values)))


@given(LENGTHS, st.integers(50, 400), st.integers(1, 4))
def test_packing_keeps_every_sample_once_and_the_token_limit(lengths: dict[int, int], limit: int, ranks: int) -> None:
    bins = pack_by_tokens(lengths, limit, multiple_of=ranks)
    assert sorted(number for members in bins for number in members) == sorted(lengths)
    assert len(bins) % ranks == 0
    for members in bins:
        assert len(members) <= 1 or sum(lengths[number] for number in members) <= limit


@given(LENGTHS, st.integers(50, 400), st.integers(1, 4))
def test_every_rank_gets_as_many_microbatches(lengths: dict[int, int], limit: int, ranks: int) -> None:
    dealt = deal_to_ranks(pack_by_tokens(lengths, limit, multiple_of=ranks), lengths, ranks)
    assert len({len(microbatches) for microbatches in dealt}) == 1
    assert sorted(n for rank in dealt for members in rank for n in members) == sorted(lengths)


@given(LENGTHS, st.integers(50, 400), st.integers(1, 4))
def test_packing_is_a_function_of_its_input(lengths: dict[int, int], limit: int, ranks: int) -> None:
    shuffled = dict(sorted(lengths.items(), key=lambda item: -item[0]))
    assert pack_by_tokens(lengths, limit, multiple_of=ranks) == pack_by_tokens(shuffled, limit, multiple_of=ranks)


def test_tokens_are_balanced_between_ranks() -> None:
    lengths = {0: 100, 1: 90, 2: 20, 3: 10}
    dealt = deal_to_ranks([[0], [1], [2], [3]], lengths, 2)
    assert [sum(lengths[n] for members in rank for n in members) for rank in dealt] == [110, 110]


def test_too_few_long_samples_leave_an_empty_microbatch_rather_than_break_the_limit() -> None:
    bins = pack_by_tokens({0: 100, 1: 100, 2: 100}, 120, multiple_of=2)
    assert sorted(map(len, bins)) == [0, 1, 1, 1]


def test_fewer_samples_than_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="1 samples can't give 2 ranks"):
        pack_by_tokens({0: 5}, 10, multiple_of=2)
    with pytest.raises(ValueError, match="1 samples can't give 2 ranks"):
        split_evenly([0], 4, 2)


@given(st.integers(4, 80), st.integers(1, 9), st.integers(1, 4))
def test_static_microbatches_keep_order_and_size(count: int, size: int, ranks: int) -> None:
    parts = split_evenly(list(range(count)), size, ranks)
    assert [n for part in parts for n in part] == list(range(count))
    assert len(parts) % ranks == 0
    assert all(len(part) <= size for part in parts)
