"""Estimators of the KL divergence between two policies from the log-probabilities of sampled tokens."""

from __future__ import annotations

from enum import Enum

import torch

CLAMP = 10.0
"""Largest absolute value of one `low_var_kl` term."""


class KlKind(Enum):
    """Estimator of KL(policy || base); the names are those of joschu.net/blog/kl-approx.html."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    LOW_VAR_KL = "low_var_kl"
    """k3, clamped to [-10, 10]."""


def kl_terms(
    log_probs: torch.Tensor,
    base_log_probs: torch.Tensor,
    kind: KlKind,
    *,
    importance_ratio: torch.Tensor | None = None,
) -> torch.Tensor:
    """KL estimate of each token, differentiable in both arguments.

    With d = log_probs - base_log_probs: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.

    Args:
        log_probs: [R] of the policy, natural log.
        base_log_probs: [R] of the policy it is compared with.
        kind: the estimator.
        importance_ratio: [R] current over old policy, with its gradient; multiplies the estimate before the clamp, so
            that its gradient is unbiased for tokens of the old policy. None means 1.

    Returns [R], same dtype as `log_probs`.
    """
    difference = log_probs - base_log_probs
    if kind is KlKind.K1:
        terms = difference
    elif kind is KlKind.K2:
        terms = difference.square() / 2
    else:
        terms = torch.expm1(-difference) + difference
    if importance_ratio is not None:
        terms = importance_ratio * terms
    return terms.clamp(-CLAMP, CLAMP) if kind is KlKind.LOW_VAR_KL else terms
