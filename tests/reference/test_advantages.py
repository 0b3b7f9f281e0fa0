"""Rewards, returns, advantages and whitening against plain recurrences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.dense_advantages import discounted_returns, gae, grouped_rewards, whitened
from tests.reference.ragged_batches import Sequence_, assert_close, flat, lengths, random_step, spoiled
from vime.algorithms.advantages import (
    distilled,
    generalized_advantages,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from vime.algorithms.ragged import on_one_rank, reverse_scan
from vime.algorithms.rewards import normalize_rewards
from vime.algorithms.whitening import moment_sums, whiten
from vime.errors import SampleError

SEEDS = st.integers(0, 2**32 - 1)
COEFFICIENTS = st.sampled_from([0.0, 0.3, 0.97, 1.0])


def rewards_of(step: Sequence[Sequence_]) -> torch.Tensor:
    """One reward for each sequence."""
    return torch.tensor([item.advantages[0] for item in step])


def kl_of(step: Sequence[Sequence_]) -> list[list[float]]:
    """Some number for each token; which one doesn't matter here."""
    return [item.reference for item in step]


@settings(max_examples=60)
@given(seed=SEEDS, divide=st.booleans())
def test_rewards_are_normalised_within_groups_over_rollouts_not_segments(seed: int, divide: bool) -> None:
    rng = np.random.default_rng(seed)
    rollouts = rng.integers(0, 12, 20).tolist()
    group_of, reward_of = rng.integers(0, 4, 12), rng.integers(0, 3, 12) + rng.normal(size=12)
    groups = [int(group_of[rollout]) for rollout in rollouts]
    rewards = [float(reward_of[rollout]) for rollout in rollouts]
    found = normalize_rewards(rewards, groups, rollouts, std_normalization=divide)
    assert_close(torch.tensor(found), grouped_rewards(rewards, groups, rollouts, divide=divide))


@settings(max_examples=60)
@given(seed=SEEDS, kl_coef=COEFFICIENTS, gamma=COEFFICIENTS)
def test_reinforce_plus_plus_equals_the_recurrence(seed: int, kl_coef: float, gamma: float) -> None:
    step = random_step(seed)
    found = reinforce_plus_plus(
        rewards_of(step),
        flat(step, "reference"),
        flat(step, "mask").bool(),
        lengths(step),
        kl_coef=kl_coef,
        gamma=gamma,
    )
    expected = [
        value
        for item, kl in zip(step, kl_of(step), strict=True)
        for value in discounted_returns(item.advantages[0], kl, item.mask, kl_coef, gamma)
    ]
    assert_close(found.advantages, expected)
    assert torch.equal(found.advantages, found.returns)


def test_reinforce_plus_plus_baseline_is_the_centred_reward_less_the_penalty() -> None:
    step = random_step(4)
    found = reinforce_plus_plus_baseline(
        rewards_of(step), flat(step, "reference"), flat(step, "mask").bool(), lengths(step), kl_coef=0.3
    )
    expected = [
        item.advantages[0] - 0.3 * kl * kept
        for item in step
        for kl, kept in zip(item.reference, item.mask, strict=True)
    ]
    assert_close(found.advantages, expected)
    assert torch.equal(found.advantages, found.returns)


@settings(max_examples=60)
@given(seed=SEEDS, kl_coef=COEFFICIENTS, gamma=COEFFICIENTS, lambd=COEFFICIENTS, chunk=st.sampled_from([1, 3, 128]))
def test_gae_equals_the_naive_recurrence_for_any_chunk(
    seed: int, kl_coef: float, gamma: float, lambd: float, chunk: int
) -> None:
    step = random_step(seed)
    found = generalized_advantages(
        rewards_of(step),
        flat(step, "reference"),
        flat(step, "entropies"),
        flat(step, "mask").bool(),
        lengths(step),
        kl_coef=kl_coef,
        gamma=gamma,
        lambd=lambd,
        chunk=chunk,
    )
    pairs = [
        gae(item.advantages[0], kl, item.entropies, item.mask, (kl_coef, gamma, lambd))
        for item, kl in zip(step, kl_of(step), strict=True)
    ]
    assert_close(found.advantages, [value for advantages, _ in pairs for value in advantages])
    assert_close(found.returns, [value for _, returns in pairs for value in returns])


def test_long_scan_equals_the_recurrence_over_many_chunks() -> None:
    rng = np.random.default_rng(0)
    sizes = [1, 1000, 129, 128, 127]
    values = torch.tensor(rng.normal(size=sum(sizes)))
    found = reverse_scan(values, torch.tensor(sizes), 0.97)
    expected: list[float] = []
    for part in torch.split(values, sizes):
        following, of_sequence = 0.0, []
        for value in reversed(part.tolist()):
            following = value + 0.97 * following
            of_sequence.append(following)
        expected += reversed(of_sequence)
    assert_close(found, expected, rel=1e-12)


@settings(max_examples=40)
@given(seed=SEEDS, owners=st.lists(st.integers(0, 2), min_size=7, max_size=7))
def test_whitening_over_ranks_equals_whitening_of_the_whole_batch(seed: int, owners: list[int]) -> None:
    step = random_step(seed, token_advantages=True)
    expected = whitened(
        [value for item in step for value in item.advantages], [kept for item in step for kept in item.mask]
    )
    ranks = [[item for item, owner in zip(step, owners, strict=False) if owner == rank] for rank in range(3)]
    whole = sum(moment_sums(flat(mine, "advantages"), flat(mine, "mask").bool()) for mine in ranks)
    found = {
        id(item): part
        for mine in ranks
        for item, part in zip(
            mine,
            torch.split(
                whiten(flat(mine, "advantages"), flat(mine, "mask").bool(), lambda _: whole),
                [item.length for item in mine],
            ),
            strict=True,
        )
    }
    assert_close(torch.cat([found[id(item)] for item in step]), expected)


def test_whitening_keeps_its_digits_far_from_zero() -> None:
    values = torch.tensor([1000.0, 1000.5, 1001.0, 999.5])
    expected = whitened(values.tolist(), [1, 1, 1, 1])
    assert_close(whiten(values, torch.ones(4, dtype=torch.bool), on_one_rank), expected)


def test_equal_advantages_are_whitened_to_zero() -> None:
    assert whiten(torch.full((5,), 0.1), torch.ones(5, dtype=torch.bool), on_one_rank).abs().max() < 1e-3
    assert whiten(torch.tensor([3.0]), torch.tensor([True]), on_one_rank).item() == 0.0


def test_a_rank_without_tokens_takes_part_in_whitening() -> None:
    nothing = torch.zeros(0)
    assert moment_sums(nothing, nothing.bool()).tolist() == [0, 0, 0]
    assert whiten(nothing, nothing.bool(), lambda _: torch.tensor([4.0, 6.0, 3.0])).shape == (0,)


def test_whitening_without_any_trained_token_is_refused() -> None:
    with pytest.raises(SampleError, match="no token of the batch is trained, allowed: at least one"):
        whiten(torch.ones(2), torch.zeros(2, dtype=torch.bool), on_one_rank)


def test_distillation_subtracts_the_reverse_kl_from_the_advantages() -> None:
    student, teacher = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -0.5])
    advantages, reverse_kl = distilled(torch.tensor([1.0, 1.0]), student, teacher, coef=2.0)
    assert reverse_kl.tolist() == [0.5, -1.5]
    assert advantages.tolist() == [0.0, 4.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_masked_tokens_never_reach_a_trained_advantage(value: float) -> None:
    """In GAE this holds for the KL; the critic's values at masked tokens are states that rewards pass through."""
    step = random_step(9)
    bad = spoiled(step, value)
    mask, size, rewards = flat(step, "mask").bool(), lengths(step), rewards_of(step)
    arguments = {"kl_coef": 0.5, "gamma": 0.9}

    def results(kl: torch.Tensor, advantages: torch.Tensor) -> list[torch.Tensor]:
        return [
            reinforce_plus_plus(rewards, kl, mask, size, **arguments).advantages,
            reinforce_plus_plus_baseline(rewards, kl, mask, size, kl_coef=0.5).advantages,
            generalized_advantages(rewards, kl, flat(step, "entropies"), mask, size, lambd=0.9, **arguments).advantages,
            whiten(advantages, mask, on_one_rank),
        ]

    clean = results(flat(step, "reference"), flat(step, "advantages"))
    for found, expected in zip(results(flat(bad, "reference"), flat(bad, "advantages")), clean, strict=True):
        assert torch.equal(found, expected)


def test_a_wholly_masked_sequence_gets_no_return() -> None:
    mask, size = torch.tensor([False, False, True]), torch.tensor([2, 1])
    found = reinforce_plus_plus(torch.tensor([5.0, 7.0]), torch.ones(3), mask, size, kl_coef=1.0, gamma=1.0)
    assert found.advantages.tolist() == [0.0, 0.0, 6.0]


def test_a_constant_reward_gives_no_group_relative_advantage() -> None:
    assert not normalize_rewards([0.7] * 6, [1, 1, 1, 2, 2, 2]).any()
