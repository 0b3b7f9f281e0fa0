"""Policy objectives against plain Python arithmetic, gradients included."""

from __future__ import annotations

import math

import pytest
import torch

from vime.algorithms.policy_loss import (
    PolicyLossSettings,
    PolicyObjective,
    kept_by_sequence_mask,
    policy_loss,
    sequence_ppo_kl,
    supervised_loss,
    token_ppo_kl,
    value_loss,
)
from vime.errors import SettingsError

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


def one_token(log_ratio: float, advantage: float, settings: PolicyLossSettings) -> tuple[float, float, float]:
    """(loss, d loss / d log_prob, clipped) by the product, at old log-probability -2."""
    log_prob = torch.tensor([-2.0 + log_ratio], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-2.0], dtype=torch.float64)
    found = policy_loss(log_prob, token_ppo_kl(log_prob, old), torch.tensor([advantage]), settings)
    found.loss.sum().backward()
    assert log_prob.grad is not None
    assert found.ratio.item() == pytest.approx(math.exp(log_ratio))
    return found.loss.item(), log_prob.grad.item(), found.clipped.item()


@pytest.mark.parametrize("dual", [None, DUAL])
@pytest.mark.parametrize("advantage", [1.5, -1.5, 0.0])
@pytest.mark.parametrize("log_ratio", [-3.0, -0.5, -0.1, 0.05, 0.2, 0.5, 2.0])
def test_ppo_and_its_gradient_equal_the_formula_in_every_region(
    log_ratio: float, advantage: float, dual: float | None
) -> None:
    settings = PolicyLossSettings(PolicyObjective.PPO, LOW, HIGH, dual)
    expected = reference(-2.0 + log_ratio, -2.0, advantage, dual)
    assert one_token(log_ratio, advantage, settings) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("log_ratio", "weight", "clipped"), [(-1.0, 0.8, 1), (0.1, math.exp(0.1), 0), (1.0, 1.3, 1)])
def test_cispo_clips_the_weight_and_keeps_every_gradient(log_ratio: float, weight: float, clipped: int) -> None:
    settings = PolicyLossSettings(PolicyObjective.CISPO, LOW, HIGH)
    expected = (-weight * 1.5 * (-2.0 + log_ratio), -weight * 1.5, clipped)
    assert one_token(log_ratio, 1.5, settings) == pytest.approx(expected)


def test_reinforce_ignores_ratio_and_clip_range() -> None:
    found = one_token(3.0, -1.5, PolicyLossSettings(PolicyObjective.REINFORCE, LOW, HIGH))
    assert found == pytest.approx((1.5 * 1.0, 1.5, 0.0))


def test_upper_range_defaults_to_the_lower_one() -> None:
    assert one_token(1.0, 1.0, PolicyLossSettings(eps_clip=0.2))[0] == pytest.approx(-1.2)


def test_old_policy_and_advantages_receive_no_gradient() -> None:
    old, advantage = torch.tensor([-1.0], requires_grad=True), torch.tensor([1.0], requires_grad=True)
    log_prob = torch.tensor([-1.0], requires_grad=True)
    policy_loss(log_prob, token_ppo_kl(log_prob, old), advantage, PolicyLossSettings()).loss.sum().backward()
    assert old.grad is None
    assert advantage.grad is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps_clip_c": 1.0}, "eps_clip_c is 1.0, allowed: above 1"),
        ({"eps_clip": -0.1}, "eps_clip is -0.1 and eps_clip_high None, allowed: not below 0"),
        ({"eps_clip_high": -1.0}, "eps_clip is 0.2 and eps_clip_high -1.0"),
    ],
)
def test_a_range_that_is_none_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        PolicyLossSettings(**options)


def test_a_sequence_shares_the_mean_of_its_trained_tokens() -> None:
    log_probs = torch.tensor([-1.0, -1.0, -5.0, -2.0], requires_grad=True)
    old, mask = torch.tensor([-0.5, -2.5, -1.0, -2.0]), torch.tensor([True, True, False, False])
    found = sequence_ppo_kl(log_probs, old, mask, torch.tensor([3, 1]))
    assert found.tolist() == [-0.5, -0.5, -0.5, 0.0]
    found.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [-1.5, -1.5, 0.0, 0.0]


def test_a_sequence_cut_over_ranks_has_the_same_mean_and_gradient() -> None:
    """Sequences of 3 and 2 tokens; one rank holds 1 and 2 tokens of them, the other 2 and 0."""
    log_probs = torch.tensor([-1.0, -3.0, -2.0, -4.0, -1.0], dtype=torch.float64)
    old, mask = log_probs.flip(0), torch.tensor([True, False, True, True, True])
    factor = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    whole = log_probs.clone().requires_grad_()
    expected = sequence_ppo_kl(whole, old, mask, torch.tensor([3, 2]))
    (expected * factor).sum().backward()

    cut = log_probs.clone().requires_grad_()
    ranks = [(torch.tensor([0, 3, 4]), torch.tensor([1, 2])), (torch.tensor([1, 2]), torch.tensor([2, 0]))]
    partial: list[list[torch.Tensor]] = []
    for rows, sizes in ranks:
        seen: list[torch.Tensor] = []
        sequence_ppo_kl(cut[rows], old[rows], mask[rows], sizes, lambda part, seen=seen: (seen.append(part), part)[1])
        partial.append(seen)
    loss = torch.zeros((), dtype=torch.float64)
    for rows, sizes in ranks:
        sums = iter([sum(parts) for parts in zip(*partial, strict=True)])
        found = sequence_ppo_kl(cut[rows], old[rows], mask[rows], sizes, lambda _, sums=sums: next(sums))
        assert torch.equal(found, expected[rows])
        loss = loss + (found * factor[rows]).sum()
    loss.backward()
    assert whole.grad is not None
    torch.testing.assert_close(cut.grad, whole.grad)


def test_only_negative_advantages_of_drifted_sequences_are_dropped() -> None:
    old = torch.zeros(6)
    log_probs = torch.tensor([-1.0, -1.0, -1.0, -0.1, -0.1, -0.1])
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0, -1.0, -1.0])
    mask = torch.tensor([True, True, False, True, True, True])
    kept = kept_by_sequence_mask(log_probs, old, advantages, mask, torch.tensor([3, 3]), delta=0.5)
    assert kept.tolist() == [False, True, True, True, True, True]


@pytest.mark.parametrize(
    ("value", "returns", "loss", "slope", "moved"),
    [
        (1.1, 2.0, 0.9**2, -1.8, 0.0),  # inside the range: the plain square
        (1.5, 2.0, 0.8**2, 0.0, 1.0),  # nearer to the return than the range allows: the clipped square, no gradient
        (0.5, 2.0, 1.5**2, -3.0, 1.0),  # moved away from it: the plain square
    ],
)
def test_value_loss_is_the_larger_of_plain_and_clipped_square(
    value: float, returns: float, loss: float, slope: float, moved: float
) -> None:
    leaf = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    found, clipped = value_loss(leaf, torch.tensor([1.0]), torch.tensor([returns]), value_clip=0.2)
    found.sum().backward()
    assert leaf.grad is not None
    assert (found.item(), leaf.grad.item(), clipped.item()) == pytest.approx((loss, slope, moved), rel=1e-6)


def test_supervised_loss_is_the_negative_log_likelihood() -> None:
    assert supervised_loss(torch.tensor([-0.25, -3.0])).tolist() == [0.25, 3.0]
