"""Losses that aren't the policy's, in float64, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Scalar = torch.Tensor


def supervised(
    sequences: Sequence[Any], log_probs: Sequence[Sequence[Scalar]], *, per_token: bool
) -> tuple[Scalar, dict[str, float]]:
    """(negative mean log-likelihood of the step, metrics); means over rollouts or over trained tokens."""
    rollouts = sorted({item.rollout for item in sequences})
    trained_of = {rollout: sum(sum(s.mask) for s in sequences if s.rollout == rollout) for rollout in rollouts}
    all_tokens = sum(max(sum(item.mask), 1) for item in sequences)
    loss, entropy = torch.zeros((), dtype=torch.float64), 0.0
    for item, of_sequence in zip(sequences, log_probs, strict=True):
        for t in range(item.length):
            if item.mask[t]:
                share = 1 / all_tokens if per_token else 1 / (len(rollouts) * max(trained_of[item.rollout], 1))
                loss = loss - share * of_sequence[t]
                entropy += share * item.entropies[t]
    return loss, {"loss": float(loss.detach()), "entropy_loss": entropy}
