"""KL estimators against hand-computed numbers and against the divergence that they estimate."""

from __future__ import annotations

import math

import pytest
import torch

from vime.algorithms.kl import KlKind, kl_terms


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [
        (KlKind.K1, 0.5, 1.0),
        (KlKind.K2, 0.125, 0.5),
        (KlKind.K3, math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)),
        (KlKind.LOW_VAR_KL, math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)),
    ],
)
def test_value_and_gradient_at_half_a_nat(kind: KlKind, value: float, slope: float) -> None:
    log_prob = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    found = kl_terms(log_prob, torch.tensor([-1.5], dtype=torch.float64), kind)
    found.sum().backward()
    assert log_prob.grad is not None
    assert (found.item(), log_prob.grad.item()) == pytest.approx((value, slope))


@pytest.mark.parametrize("kind", [KlKind.K1, KlKind.K3])
def test_the_expectation_under_the_policy_is_the_divergence(kind: KlKind) -> None:
    generator = torch.Generator().manual_seed(0)
    policy, base = (torch.randn(7, generator=generator).double().log_softmax(-1) for _ in range(2))
    expected = (policy.exp() * (policy - base)).sum()
    assert (policy.exp() * kl_terms(policy, base, kind)).sum().item() == pytest.approx(expected.item())


def test_low_variance_kl_is_bounded_after_the_importance_ratio() -> None:
    log_prob = torch.tensor([-9.0, -9.0], requires_grad=True)
    base = torch.tensor([-4.0, -4.0])  # k3 is exp(5) - 6 = 142.4
    found = kl_terms(log_prob, base, KlKind.LOW_VAR_KL, importance_ratio=torch.tensor([1.0, 0.01]))
    found.sum().backward()
    assert found.tolist() == pytest.approx([10.0, 1.424], rel=1e-3)
    assert log_prob.grad is not None
    assert log_prob.grad[0] == 0.0
    assert log_prob.grad[1] != 0.0


def test_the_unbiased_gradient_is_that_of_the_divergence_though_tokens_come_from_the_old_policy() -> None:
    generator = torch.Generator().manual_seed(1)
    old, base = (torch.randn(7, generator=generator).double().log_softmax(-1) for _ in range(2))
    logits = torch.randn(7, generator=generator).double().requires_grad_()
    policy = logits.log_softmax(-1)
    (expected,) = torch.autograd.grad((policy.exp() * (policy - base)).sum(), logits, retain_graph=True)
    terms = kl_terms(policy, base, KlKind.K3, importance_ratio=(policy - old).exp())
    (found,) = torch.autograd.grad((old.exp() * terms).sum(), logits, retain_graph=True)
    torch.testing.assert_close(found, expected)
    (biased,) = torch.autograd.grad((old.exp() * kl_terms(policy, base, KlKind.K3)).sum(), logits)
    assert (biased - expected).abs().max() > 1e-3


def test_equal_policies_have_no_divergence() -> None:
    log_probs = torch.tensor([-0.1, -7.0])
    for kind in KlKind:
        assert kl_terms(log_probs, log_probs, kind).tolist() == [0.0, 0.0]
