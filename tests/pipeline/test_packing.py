"""Sequence packing: nothing lost, limits kept, ranks equal and even."""

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.balance import share_out
from pipeline.bins import raise_count
from pipeline.packing import Microbatches, PackingSettings, pack_step
from vime.errors import TrainerError

LENGTHS = st.lists(st.integers(1, 300), min_size=4, max_size=60).map(lambda values: dict(enumerate(values, start=7)))
PACKINGS = st.builds(
    PackingSettings,
    num_ranks=st.integers(1, 4),
    max_tokens=st.none() | st.integers(304, 900),
    micro_batch_size=st.integers(1, 9),
    balance=st.booleans(),
    linear_work=st.none() | st.floats(0, 1e5),
    count_multiple=st.integers(1, 3),
    length_multiple=st.sampled_from([1, 4]),
)


def numbers_of(plan: Microbatches) -> list[int]:
    return [number for rank in plan for members in rank for number in members]


def tokens_of_ranks(plan: Microbatches, lengths: dict[int, int]) -> list[int]:
    return [sum(lengths[number] for members in rank for number in members) for rank in plan]


@given(LENGTHS, PACKINGS)
def test_every_sample_is_in_exactly_one_microbatch(lengths: dict[int, int], packing: PackingSettings) -> None:
    assert sorted(numbers_of(pack_step(lengths, packing))) == sorted(lengths)


@given(LENGTHS, PACKINGS)
def test_no_microbatch_exceeds_its_limit(lengths: dict[int, int], packing: PackingSettings) -> None:
    for members in (members for rank in pack_step(lengths, packing) for members in rank):
        if packing.max_tokens is None:
            assert len(members) <= packing.micro_batch_size
        else:
            assert sum(packing.length(lengths[number]) for number in members) <= packing.max_tokens


@given(LENGTHS, PACKINGS)
def test_every_rank_gets_as_many_microbatches_and_a_sample(lengths: dict[int, int], packing: PackingSettings) -> None:
    plan = pack_step(lengths, packing)
    (count,) = {len(rank) for rank in plan}
    assert len(plan) == packing.num_ranks
    assert count % packing.count_multiple == 0
    assert all(any(rank) for rank in plan)


@given(LENGTHS, PACKINGS, st.randoms())
def test_packing_is_a_function_of_its_input(
    lengths: dict[int, int], packing: PackingSettings, chance: random.Random
) -> None:
    items = list(lengths.items())
    chance.shuffle(items)
    assert pack_step(dict(items), packing) == pack_step(lengths, packing)


@given(LENGTHS, st.integers(304, 900))
def test_no_two_microbatches_of_a_rank_would_fit_in_one(lengths: dict[int, int], limit: int) -> None:
    (rank,) = pack_step(lengths, PackingSettings(num_ranks=1, max_tokens=limit))
    loads = sorted(sum(lengths[number] for number in members) for members in rank)
    assert len(loads) == 1 or loads[0] + loads[1] > limit


@settings(max_examples=30)
@given(st.lists(st.integers(1, 300), min_size=3, max_size=7), st.integers(1, 3))
def test_greatest_share_is_within_four_thirds_of_the_best(costs: list[int], num_ranks: int) -> None:
    def greatest(ranks: Sequence[Sequence[int]]) -> int:
        return max(sum(costs[number] for number in members) for members in ranks)

    owners = itertools.product(range(num_ranks), repeat=len(costs))
    best = min(
        greatest([[n for n, owner in enumerate(choice) if owner == rank] for rank in range(num_ranks)])
        for choice in owners
    )
    shares = share_out(dict(enumerate(map(float, costs))), num_ranks)
    assert greatest(shares) <= (4 / 3 - 1 / (3 * num_ranks)) * best


def test_work_of_long_sequences_is_balanced_where_tokens_are_not() -> None:
    lengths = {0: 1000, **dict.fromkeys(range(1, 21), 100)}
    by_tokens = PackingSettings(num_ranks=2, max_tokens=1000, balance=True)
    by_work = PackingSettings(num_ranks=2, max_tokens=1000, balance=True, linear_work=0.0)
    assert tokens_of_ranks(pack_step(lengths, by_tokens), lengths) == [1500, 1500]
    assert tokens_of_ranks(pack_step(lengths, by_work), lengths) == [1000, 2000]


def test_ranks_of_fixed_microbatches_are_balanced_by_tokens() -> None:
    lengths = {0: 100, 1: 90, 2: 20, 3: 10}
    plain = pack_step(lengths, PackingSettings(num_ranks=2, micro_batch_size=2))
    even = pack_step(lengths, PackingSettings(num_ranks=2, micro_batch_size=2, balance=True))
    assert tokens_of_ranks(plain, lengths) == [190, 30]
    assert tokens_of_ranks(even, lengths) == [110, 110]


def test_balance_never_gives_a_fixed_microbatch_more_samples_than_its_size() -> None:
    lengths = {0: 100, 1: 10, 2: 10, 3: 10}
    plan = pack_step(lengths, PackingSettings(num_ranks=2, micro_batch_size=2, balance=True))
    assert [[len(members) for members in rank] for rank in plan] == [[2], [2]]


def test_fixed_microbatches_keep_the_order_of_the_samples() -> None:
    lengths = dict.fromkeys(range(8), 5)
    plan = pack_step(lengths, PackingSettings(num_ranks=2, micro_batch_size=2))
    assert plan == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@given(LENGTHS, PACKINGS)
def test_largest_microbatch_of_a_rank_comes_first(lengths: dict[int, int], packing: PackingSettings) -> None:
    for rank in pack_step(lengths, packing):
        loads = [sum(packing.length(lengths[number]) for number in members) for members in rank]
        assert loads == sorted(loads, reverse=True)


def test_short_samples_fill_the_room_that_long_ones_leave() -> None:
    plan = pack_step({0: 3, 1: 3, 2: 7, 3: 7}, PackingSettings(num_ranks=1, max_tokens=10))
    assert plan == [[[2, 0], [3, 1]]]


def test_padding_of_sequences_counts_towards_the_limit() -> None:
    lengths = dict.fromkeys(range(4), 5)
    (plain,) = pack_step(lengths, PackingSettings(num_ranks=1, max_tokens=20))
    (padded,) = pack_step(lengths, PackingSettings(num_ranks=1, max_tokens=20, length_multiple=8))
    assert list(map(len, plain)) == [4]
    assert list(map(len, padded)) == [2, 2]


def test_too_few_long_samples_leave_an_empty_microbatch_rather_than_break_the_limit() -> None:
    plan = pack_step({0: 100, 1: 100, 2: 100}, PackingSettings(num_ranks=2, max_tokens=120))
    assert sorted(len(members) for rank in plan for members in rank) == [0, 1, 1, 1]


def test_a_sample_longer_than_a_microbatch_is_refused_with_both_lengths() -> None:
    packing = PackingSettings(num_ranks=1, max_tokens=40)
    assert pack_step({0: 40, 1: 3}, packing) == [[[0], [1]]]
    with pytest.raises(TrainerError) as caught:
        pack_step({0: 9, 5: 41}, packing)
    assert "sample 5 of the batch takes 41 tokens, a microbatch may have 40" in str(caught.value)
    assert "Raise --max-tokens-per-gpu" in caught.value.next_step


def test_fewer_samples_than_ranks_are_refused() -> None:
    for packing in (PackingSettings(num_ranks=2, max_tokens=10), PackingSettings(num_ranks=2, balance=True)):
        with pytest.raises(ValueError, match="1 samples can't give 2 ranks"):
            pack_step({0: 5}, packing)


def test_more_samples_than_ranks_may_have_are_refused() -> None:
    with pytest.raises(ValueError, match="5 samples don't fit 2 ranks of 2"):
        share_out(dict.fromkeys(range(5), 1.0), 2, most=2)


def test_fullest_bins_are_halved_until_there_are_enough() -> None:
    lengths = {0: 9, 1: 1, 2: 8, 3: 7, 4: 2}
    assert raise_count([[0, 1], [2, 3, 4]], lengths, 3) == [[0, 1], [2], [3, 4]]
