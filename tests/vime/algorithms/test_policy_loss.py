"""The clipped loss against plain Python arithmetic, gradients included."""

from __future__ import annotations

import math

import pytest
import torch

from vime.algorithms.policy_loss import clipped_policy_loss

LOW, HIGH, DUAL = 0.2, 0.3, 2.0


def reference(log_prob: float, old: float, advantage: float, dual: float | None) -> tuple[float, float, float]:
    """(loss, d loss / d log_prob, clipped) of one token."""
    ratio = math.exp(log_prob - old)
    bounded = min(max(ratio, 1 - LOW), 1 + HIGH)
    plain, clipped = -ratio * advantage, -bounded * advantage
    loss, slope = (plain, -ratio * advantage) if plain >= clipped else (clipped, 0.0)
    if dual is not None and advantage < 0 and loss > -dual * advantage:
        loss, slope = -dual * advantage, 0.0
    return loss, slope, float(clipped > plain)


@pytest.mark.parametrize("dual", [None, DUAL])
@pytest.mark.parametrize("advantage", [1.5, -1.5, 0.0])
@pytest.mark.parametrize("log_ratio", [-3.0, -0.5, -0.1, 0.05, 0.2, 0.5, 2.0])
def test_loss_and_gradient_equal_the_formula_in_every_region(
    log_ratio: float, advantage: float, dual: float | None
) -> None:
    log_prob = torch.tensor([-2.0 + log_ratio], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-2.0], dtype=torch.float64)
    found = clipped_policy_loss(
        log_prob, old, torch.tensor([advantage]), eps_clip=LOW, eps_clip_high=HIGH, eps_clip_c=dual
    )
    found.loss.sum().backward()
    loss, slope, clipped = reference(-2.0 + log_ratio, -2.0, advantage, dual)
    assert found.loss.item() == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert log_prob.grad is not None
    assert log_prob.grad.item() == pytest.approx(slope, rel=1e-9, abs=1e-12)
    assert found.clipped.item() == clipped
    assert found.ppo_kl.item() == pytest.approx(-log_ratio)
    assert found.ois.item() == pytest.approx(math.exp(log_ratio))


def test_upper_range_defaults_to_the_lower_one() -> None:
    found = clipped_policy_loss(torch.tensor([0.0]), torch.tensor([-1.0]), torch.tensor([1.0]), eps_clip=0.2)
    assert found.loss.item() == pytest.approx(-1.2)


def test_old_policy_and_advantages_receive_no_gradient() -> None:
    old, advantage = torch.tensor([-1.0], requires_grad=True), torch.tensor([1.0], requires_grad=True)
    log_prob = torch.tensor([-1.0], requires_grad=True)
    clipped_policy_loss(log_prob, old, advantage, eps_clip=0.2).loss.sum().backward()
    assert old.grad is None
    assert advantage.grad is None
