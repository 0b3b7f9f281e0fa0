"""The critic's loss in float64, token by token in plain loops, from the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Scalar = torch.Tensor


@dataclass(frozen=True)
class ValueSequence:
    """One sequence; lists are per response token."""

    rollout: int
    mask: Sequence[int]
    old: Sequence[float]
    returns: Sequence[float]


def value_step(
    sequences: Sequence[ValueSequence], values: Sequence[Sequence[Scalar]], *, clip: float, per_token: bool
) -> tuple[Scalar, dict[str, float]]:
    """(loss, metrics) of a step; `values` are differentiable scalars."""
    rollouts = sorted({item.rollout for item in sequences})
    trained_of = {number: sum(sum(s.mask) for s in sequences if s.rollout == number) for number in rollouts}
    all_tokens = sum(max(sum(item.mask), 1) for item in sequences)
    loss = torch.zeros((), dtype=torch.float64)
    clipped = 0.0
    trained: list[tuple[float, float]] = []
    for item, row in zip(sequences, values, strict=True):
        for t, value in enumerate(row):
            if not item.mask[t]:
                continue
            share = 1 / all_tokens if per_token else 1 / (len(rollouts) * trained_of[item.rollout])
            moved = float(value.detach()) - item.old[t]
            plain = (value - item.returns[t]) ** 2
            bounded = plain
            if abs(moved) > clip:
                edge = item.old[t] + (clip if moved > 0 else -clip)
                bounded = torch.tensor((edge - item.returns[t]) ** 2, dtype=torch.float64)
                clipped += share
            loss = loss + share * (plain if float(plain.detach()) >= float(bounded.detach()) else bounded)
            trained.append((item.old[t], item.returns[t]))
    return loss, {
        "value_loss": float(loss.detach()),
        "value_clipfrac": clipped,
        "value_explained_variance": _explained(trained),
    }


def _explained(pairs: Sequence[tuple[float, float]]) -> float:
    returns, errors = [r for _, r in pairs], [r - v for v, r in pairs]
    return 1 - _variance(errors) / _variance(returns) if _variance(returns) > 0 else 0.0


def _variance(numbers: Sequence[float]) -> float:
    mean = sum(numbers) / len(numbers)
    return sum((number - mean) ** 2 for number in numbers) / len(numbers)
