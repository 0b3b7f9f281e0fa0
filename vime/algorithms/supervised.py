"""Supervised fine-tuning: the likelihood of the tokens of a record, aggregated as every loss is."""

from __future__ import annotations

import torch

from vime.algorithms.aggregate import token_weights, weighted_sum, weighted_sums
from vime.algorithms.loss_tokens import LossTokens
from vime.algorithms.policy_loss import supervised_loss
from vime.data.batch import StepTotals


def supervised_objective(
    totals: StepTotals, tokens: LossTokens, log_probs: torch.Tensor, entropies: torch.Tensor, *, per_token: bool
) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """(loss, metrics, [S] each sequence's part of the loss) of one microbatch, divided by the denominators of the whole
    step; all but the loss are detached.

    Args:
        totals: sums over all ranks and microbatches of the step.
        tokens: mask, lengths and denominators; nothing else of them is read.
        log_probs: [R] differentiable. What masked tokens hold reaches neither loss nor gradient.
        entropies: [R] reported only.
        per_token: mean over trained tokens in place of the mean over samples.
    """
    mask = tokens.loss_mask
    weights = token_weights(mask, tokens.response_lengths, tokens.mask_sums, totals, per_token=per_token)
    losses = supervised_loss(log_probs.where(mask, 0.0))
    loss = weighted_sum(losses, weights)
    entropy = weighted_sum(entropies.where(mask, 0.0), weights)
    of_samples = weighted_sums(losses.detach(), weights, tokens.response_lengths)
    return loss, {"loss": loss.detach(), "entropy_loss": entropy.detach()}, of_samples
