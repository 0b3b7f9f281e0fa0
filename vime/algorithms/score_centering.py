"""Score centering (arXiv 2609.20807): coefficients of the correction, without the vocabulary.

The correction of a token is C = sum over candidates v of residual_v * log p_v, whose gradient is that of the
expected weighted score under the sampler, mu = sum_v q_v f(p_v / q_v) grad log p_v. Only log p carries a gradient.
p is the current trainer policy at the sampling temperature, q the sampler's, f the rule of the importance weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from vime.algorithms.importance import WeightRule

TAIL_FLOOR = 1e-6
"""Smallest probability mass outside the head; keeps the ratio of the tails finite."""


class CenteringTerms(NamedTuple):
    """What the loss needs of each response token, float32 [R]; only `correction` carries a gradient."""

    correction: torch.Tensor
    sampler_head_mass: torch.Tensor
    """Sampler probability of the candidates together; 1 for a recorded top-p support."""
    train_head_mass: torch.Tensor
    """Trainer probability of the same candidates."""


@dataclass(frozen=True)
class HeadResiduals:
    """Detached coefficients of log p at the sampler's k most probable tokens."""

    residuals: torch.Tensor
    """[R, k], dtype of the trainer's log-probabilities"""
    sampler_head_mass: torch.Tensor
    """[R]"""
    train_head_mass: torch.Tensor
    """[R]"""


def head_residuals(
    train_log_probs: torch.Tensor, sampler_log_probs: torch.Tensor, train_tail_mass: torch.Tensor, rule: WeightRule
) -> HeadResiduals:
    """Residuals of a top-k head H; outside H the sampler is taken to be proportional to the trainer.

    With Q = sum_H q and rho = max(1 - Q, 1e-6) / max(1 - P, 1e-6) the sampler's tail is modelled as rho * p, and
    residual_v = q_v f(p_v / q_v) - alpha p_v with alpha = rho f(1 / rho). The tail's own term is gone because
    sum_v p_v grad log p_v = 0 over the whole vocabulary. Equal policies give residuals of exactly zero up to rounding.

    Args:
        train_log_probs: [R, k] full-vocabulary log-probabilities of the trainer at H.
        sampler_log_probs: [R, k] the same of the sampler.
        train_tail_mass: [R] 1 - P. It is asked for because a caller can sum the probabilities outside H; one minus
            a float32 sum near 1 would lose the tail's digits.
        rule: f.

    Source: equations 12 and 14, appendix A.3.
    """
    log_p, log_q = train_log_probs.detach().double(), sampler_log_probs.detach().double()
    p, q = log_p.exp(), log_q.exp()
    sampler_head_mass = q.sum(-1)
    train_tail = train_tail_mass.detach().double()
    rho = (1.0 - sampler_head_mass).clamp(min=TAIL_FLOOR) / train_tail.clamp(min=TAIL_FLOOR)
    alpha = rho * rule(1.0 / rho)
    residuals = q * rule((log_p - log_q).exp()) - alpha[:, None] * p
    kind = train_log_probs.dtype
    return HeadResiduals(residuals.to(kind), sampler_head_mass.to(kind), (1.0 - train_tail).to(kind))


def support_residuals(train_log_probs: torch.Tensor, sampler_log_probs: torch.Tensor, rule: WeightRule) -> torch.Tensor:
    """Residuals over a recorded top-p support, exact: q_v f(p_v / q_v) - f(1) p_v.

    Both arguments are [N], the supports of the tokens end to end, each normalised over its own support. Returns [N]
    detached, dtype of the trainer's log-probabilities. A support of one token has a residual that multiplies a
    log-probability of constant zero. Source: equation 9 on the truncated distribution.
    """
    log_p, log_q = train_log_probs.detach().double(), sampler_log_probs.detach().double()
    weighted = log_q.exp() * rule((log_p - log_q).exp())
    return (weighted - rule(torch.ones_like(log_p)) * log_p.exp()).to(train_log_probs.dtype)
