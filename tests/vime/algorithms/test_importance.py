"""Rules that turn a ratio of trainer to sampler into a weight."""

from __future__ import annotations

import math

import pytest
import torch

from vime.algorithms.importance import WeightKind, WeightRule, importance_weights
from vime.errors import SettingsError

RATIOS = torch.tensor([0.0, 0.4, 0.5, 1.0, 2.0, 2.1, math.inf])


@pytest.mark.parametrize(
    ("rule", "weights"),
    [
        (WeightRule(), [1.0] * 7),
        (WeightRule(WeightKind.TIS, 0.5, 2.0), [0.5, 0.5, 0.5, 1.0, 2.0, 2.0, 2.0]),
        (WeightRule(WeightKind.ICEPOP, 0.5, 2.0), [0.0, 0.0, 0.5, 1.0, 2.0, 0.0, 0.0]),
    ],
)
def test_weights_at_and_around_the_bounds(rule: WeightRule, weights: list[float]) -> None:
    assert rule(RATIOS).tolist() == weights


@pytest.mark.parametrize("bounds", [(-0.1, 2.0), (2.0, 1.0), (0.0, 0.0), (0.0, math.inf), (math.nan, 1.0)])
def test_bounds_that_are_none_are_refused(bounds: tuple[float, float]) -> None:
    with pytest.raises(SettingsError, match="allowed: finite, 0 <= lower <= upper, upper above 0"):
        WeightRule(WeightKind.TIS, *bounds)


def test_weights_carry_no_gradient_and_say_what_the_rule_changed() -> None:
    train = torch.tensor([-1.0, -1.0], requires_grad=True)
    found = importance_weights(train, torch.tensor([-1.0, -1.0 - math.log(4.0)]), WeightRule(WeightKind.TIS, 0.0, 2.0))
    assert not found.weights.requires_grad
    assert found.weights.tolist() == [1.0, 2.0]
    metrics = {name: values.tolist() for name, values in found.metrics().items()}
    assert metrics["tis"] == pytest.approx([1.0, 4.0])
    assert metrics["tis_clipfrac"] == [0.0, 1.0]
    assert metrics["tis_abs"] == pytest.approx([0.0, 3.0])
