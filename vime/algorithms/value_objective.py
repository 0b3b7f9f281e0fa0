"""The critic's objective on one microbatch, and how well its values explained the returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vime.algorithms.aggregate import token_weights, weighted_sum
from vime.algorithms.policy_loss import value_loss
from vime.data.batch import StepTotals

MOMENTS = ("num_values", "return_sum", "return_square_sum", "error_sum", "error_square_sum")
"""Sums over trained tokens from which `explained_variance` is computed."""


@dataclass(frozen=True)
class ValueTokens:
    """What the loss reads of one microbatch: S sequences, R response tokens end to end."""

    loss_mask: torch.Tensor
    """[R] bool"""
    response_lengths: torch.Tensor
    """[S] int64"""
    mask_sums: torch.Tensor
    """[S] float32, trained tokens of the whole rollout that the sequence belongs to"""
    values: torch.Tensor
    """[R] float32, the critic's before the batch's first step"""
    returns: torch.Tensor
    """[R] float32"""


def value_objective(
    values: torch.Tensor, tokens: ValueTokens, totals: StepTotals, *, value_clip: float, per_token: bool
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, metrics) of the values [R] of one microbatch, both divided by the denominators of the whole step.

    Metrics are `loss`, `value_clipfrac` and the float64 sums `MOMENTS`, which add up over microbatches and ranks.
    Tokens whose mask is zero count nowhere, whatever they hold.

    Args:
        values: [R] of the critic at this moment, differentiable.
        tokens: the microbatch.
        totals: sums over all ranks and microbatches of the step.
        value_clip: how far a value may move from the old one before it stops counting.
        per_token: False is the mean over rollouts of each rollout's token mean, True the mean over tokens.

    Source: PPO2 of OpenAI Baselines for the clipping; the paper (arXiv 1707.06347) has none.
    """
    mask = tokens.loss_mask
    weights = token_weights(mask, tokens.response_lengths, tokens.mask_sums, totals, per_token=per_token)
    old, returns = tokens.values.where(mask, 0.0), tokens.returns.where(mask, 0.0)
    loss, clipped = value_loss(values.where(mask, 0.0), old, returns, value_clip=value_clip)
    total = weighted_sum(loss, weights)
    return total, {
        "loss": total.detach(),
        "value_clipfrac": weighted_sum(clipped, weights),
        **_moments(old.double(), returns.double(), mask),
    }


def _moments(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    errors = returns - values
    sums = (mask.double().sum(), returns.sum(), returns.square().sum(), errors.sum(), errors.square().sum())
    return dict(zip(MOMENTS, sums, strict=True))


def explained_variance(moments: Mapping[str, float]) -> float:
    """1 - Var(return - value) / Var(return) over trained tokens; 0 where the returns don't differ.

    1 is a perfect critic, 0 one as good as a constant, below 0 one that is worse.
    """
    count, *_ = (moments[name] for name in MOMENTS)
    if count < 1:
        return 0.0
    returns = moments["return_square_sum"] / count - (moments["return_sum"] / count) ** 2
    errors = moments["error_square_sum"] / count - (moments["error_sum"] / count) ** 2
    scale = moments["return_square_sum"] / count
    return 1.0 - errors / returns if returns > 1e-12 * scale else 0.0
