"""Denominators of a step, and that cutting the step anywhere changes nothing."""

from __future__ import annotations

import pytest
import torch

from vime.algorithms.aggregate import token_weights, weighted_sum
from vime.data.batch import StepTotals

MASK = torch.tensor([1, 0, 1, 1, 1, 0, 0])
LENGTHS = torch.tensor([3, 2, 2])
MASK_SUMS = torch.tensor([4.0, 4.0, 0.0])  # the first two sequences are segments of one rollout
VALUES = torch.tensor([1.0, 100.0, 2.0, 3.0, 4.0, 100.0, 100.0])
TOTALS = StepTotals(num_rollouts=2, num_trained_tokens=5)


def test_each_rollout_counts_once_however_many_segments_it_has() -> None:
    weights = token_weights(MASK, LENGTHS, MASK_SUMS, TOTALS, per_token=False)
    assert weighted_sum(VALUES, weights).item() == pytest.approx((1 + 2 + 3 + 4) / 4 / 2)


def test_each_trained_token_counts_once() -> None:
    weights = token_weights(MASK, LENGTHS, MASK_SUMS, TOTALS, per_token=True)
    assert weighted_sum(VALUES, weights).item() == pytest.approx((1 + 2 + 3 + 4) / 5)


@pytest.mark.parametrize("per_token", [False, True])
def test_sum_over_microbatches_equals_the_whole(per_token: bool) -> None:
    whole = weighted_sum(VALUES, token_weights(MASK, LENGTHS, MASK_SUMS, TOTALS, per_token=per_token))
    parts = [
        weighted_sum(VALUES[a:b], token_weights(MASK[a:b], LENGTHS[s:e], MASK_SUMS[s:e], TOTALS, per_token=per_token))
        for a, b, s, e in [(0, 3, 0, 1), (3, 7, 1, 3)]
    ]
    assert sum(part.item() for part in parts) == pytest.approx(whole.item(), rel=1e-6)


def test_values_of_untrained_tokens_are_ignored_even_when_not_finite() -> None:
    weights = token_weights(MASK, LENGTHS, MASK_SUMS, TOTALS, per_token=True)
    spoiled = VALUES.masked_fill(MASK == 0, float("nan"))
    assert weighted_sum(spoiled, weights).item() == pytest.approx(2.0)


def test_gradient_of_each_token_is_its_weight() -> None:
    values = VALUES.clone().requires_grad_()
    weights = token_weights(MASK, LENGTHS, MASK_SUMS, TOTALS, per_token=False)
    weighted_sum(values, weights).backward()
    assert values.grad is not None
    assert values.grad.tolist() == weights.tolist()
    assert weights.tolist() == [0.125, 0, 0.125, 0.125, 0.125, 0, 0]
