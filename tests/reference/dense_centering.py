"""Score centering over the whole vocabulary in float64, from its definition, one token at a time.

The loss of a token is -A [sg(f(p_a / q_a)) log p_a - C], and C is any function whose gradient is the sampler's expected
weighted score, mu = sum_v q_v f(p_v / q_v) grad log p_v. Here C is that sum with its coefficients held constant, over
every v of the vocabulary: nothing is folded into a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Rule = Callable[[float], float]
FLOOR = 1e-6


@dataclass(frozen=True)
class Centered:
    """Differentiable loss and expected score of one token, and what is reported about it."""

    loss: torch.Tensor
    score: torch.Tensor
    """C"""
    correction: float
    """Sum over the recorded tokens of (q f(p / q) - alpha p) log p."""
    sampler_mass: float
    train_mass: float
    weight: float


def top_k(
    logits: torch.Tensor, ids: Sequence[int], log_q: Sequence[float], action: int, log_q_action: float,
    advantage: float, rule: Rule,
) -> Centered:  # fmt: skip
    """The sampler is known at its k most probable tokens `ids`; elsewhere it is rho times the trainer.

    `logits` [V] are already divided by the temperature.
    """
    log_p = logits.log_softmax(-1)
    p = [math.exp(value) for value in log_p.tolist()]
    q_of = dict(zip(ids, (math.exp(value) for value in log_q), strict=True))
    sampler_mass = sum(q_of.values())
    train_tail = sum(p[v] for v in range(len(p)) if v not in q_of)
    rho = max(1 - sampler_mass, FLOOR) / max(train_tail, FLOOR)
    score = torch.zeros((), dtype=torch.float64)
    correction = 0.0
    for v in range(len(p)):
        q = q_of.get(v, rho * p[v])
        score = score + q * rule(p[v] / q) * log_p[v]
        if v in q_of:
            correction += (q * rule(p[v] / q) - rho * rule(1 / rho) * p[v]) * float(log_p[v].detach())
    weight = rule(p[action] / math.exp(log_q_action))
    loss = -advantage * (weight * log_p[action] - score)
    return Centered(loss, score, correction, sampler_mass, 1 - train_tail, weight)


def support(
    logits: torch.Tensor, ids: Sequence[int], log_q: Sequence[float], action: int, advantage: float, rule: Rule
) -> Centered:
    """The sampler is known exactly at every token it could have chosen; the trainer is renormalised on them."""
    log_p = logits[list(ids)].log_softmax(-1)
    mass = float(logits.detach().softmax(-1)[list(ids)].sum())
    score = torch.zeros((), dtype=torch.float64)
    correction = 0.0
    for n in range(len(ids)):
        q, p = math.exp(log_q[n]), math.exp(float(log_p[n].detach()))
        score = score + q * rule(p / q) * log_p[n]
        correction += (q * rule(p / q) - rule(1.0) * p) * float(log_p[n].detach())
    at = list(ids).index(action)
    weight = rule(math.exp(float(log_p[at].detach()) - log_q[at]))
    loss = -advantage * (weight * log_p[at] - score)
    return Centered(loss, score, correction, 1.0, mass, weight)
