"""The critic's objective over random ragged steps against the dense reference."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.dense_value import ValueSequence, value_step
from tests.reference.ragged_batches import Sequence_, assert_close, flat, lengths, random_step, spoiled, totals
from vime.algorithms.value_objective import MOMENTS, ValueTokens, explained_variance, value_objective

SEEDS = st.integers(0, 2**32 - 1)
CLIPS = st.sampled_from([0.0, 0.2, 1.0])
VALUES, OLD, RETURNS = "old", "log_probs", "reference"
"""Arrays of a random step that stand for these here; all differ."""


def tokens(step: Sequence[Sequence_], members: Sequence[int]) -> ValueTokens:
    chosen = [step[member] for member in members]
    sums = [sum(sum(other.mask) for other in step if other.rollout == item.rollout) for item in chosen]
    return ValueTokens(
        flat(chosen, "mask").bool(),
        lengths(chosen),
        torch.tensor(sums, dtype=torch.float32),
        flat(chosen, OLD),
        flat(chosen, RETURNS),
    )


def product(
    step: Sequence[Sequence_], split: Sequence[Sequence[int]], clip: float, per_token: bool
) -> tuple[dict[str, float], torch.Tensor]:
    """(metrics summed over the microbatches of `split`, gradient of each value in the order of the step)."""
    metrics: dict[str, float] = {}
    gradients = [torch.zeros(item.length) for item in step]
    for members in split:
        values = flat([step[member] for member in members], VALUES).requires_grad_()
        loss, found = value_objective(values, tokens(step, members), totals(step), value_clip=clip, per_token=per_token)
        loss.backward()
        for name, value in found.items():
            metrics[name] = metrics.get(name, 0.0) + value.item()
        parts = torch.split(values.grad, [step[member].length for member in members])
        for member, part in zip(members, parts, strict=True):
            gradients[member] = part
    return metrics, torch.cat(gradients)


@settings(max_examples=60)
@given(seed=SEEDS, clip=CLIPS, per_token=st.booleans())
def test_value_loss_and_gradient_equal_the_dense_reference_for_any_microbatches(
    seed: int, clip: float, per_token: bool
) -> None:
    step = random_step(seed)
    split = [list(range(0, len(step), 2)), list(range(1, len(step), 2))]
    metrics, gradient = product(step, split, clip, per_token)
    leaves = [[torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in vars(item)[VALUES]] for item in step]
    sequences = [ValueSequence(s.rollout, s.mask, s.log_probs, s.reference) for s in step]
    loss, expected = value_step(sequences, leaves, clip=clip, per_token=per_token)
    loss.backward()
    slopes = [0.0 if leaf.grad is None else leaf.grad.item() for row in leaves for leaf in row]
    assert metrics["loss"] == pytest.approx(expected["value_loss"], rel=1e-5)
    assert metrics["value_clipfrac"] == pytest.approx(expected["value_clipfrac"], abs=1e-6)
    explained = explained_variance({name: metrics[name] for name in MOMENTS})
    assert explained == pytest.approx(expected["value_explained_variance"], abs=1e-5)
    assert_close(gradient, slopes)


def test_masked_tokens_reach_neither_value_loss_nor_its_gradient() -> None:
    step = random_step(11)
    clean, gradient = product(step, [range(len(step))], 0.2, False)
    dirty, dirty_gradient = product(spoiled(step, float("nan")), [range(len(step))], 0.2, False)
    assert dirty == clean
    assert torch.equal(gradient, dirty_gradient)


@pytest.mark.parametrize(
    ("values", "returns", "expected"),
    [([1.0, 2.0], [1.0, 2.0], 1.0), ([1.5, 1.5], [1.0, 2.0], 0.0), ([2.0, 1.0], [1.0, 2.0], -3.0), ([0.0], [1.0], 0.0)],
)
def test_explained_variance_is_one_of_a_perfect_critic_and_zero_of_a_constant(
    values: list[float], returns: list[float], expected: float
) -> None:
    errors = [r - v for v, r in zip(values, returns, strict=True)]
    sums = (
        len(values),
        sum(returns),
        sum(r * r for r in returns),
        sum(errors),
        sum(e * e for e in errors),
    )
    assert explained_variance(dict(zip(MOMENTS, sums, strict=True))) == pytest.approx(expected)
