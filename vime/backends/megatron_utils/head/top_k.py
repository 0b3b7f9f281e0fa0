"""Score centering on the sampler's k most probable tokens, with the tail modelled (arXiv 2609.20807, eq. 14, A.3)."""

from __future__ import annotations

import torch

from vime.algorithms.importance import WeightRule
from vime.backends.megatron_utils.head.scores import Centering, Score
from vime.backends.megatron_utils.head.types import TopKCandidates

TAIL_FLOOR = 1e-6
"""Least probability mass of a tail, so that the ratio of two tails stays finite."""


def center_top_k(
    logits: torch.Tensor,
    log_total: torch.Tensor,
    log_tail: torch.Tensor,
    candidates: TopKCandidates,
    rule: WeightRule,
) -> Centering:
    """Correction from the candidates' `logits` [R, k] float64.

    `log_total` and `log_tail` [R] float64 are the logarithms of the sum of exponentials over the whole vocabulary and
    over all but the candidates: the tail's mass as one minus the head's would lose its digits.

    In the tail the sampler is taken to be rho times the trainer, where rho is the ratio of their tail masses. What the
    tail then adds is folded into the candidates, since the sum over v of p_v grad log p_v is zero.
    """
    log_p, log_q = logits - log_total[:, None], candidates.log_probs.double()
    p, q = log_p.exp(), log_q.exp()
    sampler_mass = q.sum(-1)
    sampler_tail = (1.0 - sampler_mass).clamp(min=TAIL_FLOOR)
    train_tail = (log_tail - log_total).exp()
    rho = sampler_tail / train_tail.clamp(min=TAIL_FLOOR)
    alpha = rho * rule(1.0 / rho)
    residuals = q * rule((log_p - log_q).exp()) - alpha[:, None] * p
    correction = Score(
        (residuals * log_p).sum(-1),
        softmax_factor=-residuals.sum(-1).float(),
        at_recorded=residuals.float().flatten(),
    )
    return Centering(correction, train_mass=p.sum(-1), sampler_mass=sampler_mass)
