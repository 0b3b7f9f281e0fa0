"""From per-token values to the number that a step minimises.

Both aggregations are a weighted sum over the tokens of a step whose weights depend on plan-time numbers only. So the
sum may be cut over microbatches and ranks in any way without changing the result.
"""

from __future__ import annotations

import torch

from vime.algorithms.ragged import sequence_sums
from vime.data.batch import StepTotals


def token_weights(
    loss_mask: torch.Tensor,
    response_lengths: torch.Tensor,
    mask_sums: torch.Tensor,
    totals: StepTotals,
    *,
    per_token: bool,
) -> torch.Tensor:
    """Weight of each response token in the step's objective, float32 [R]; zero where the mask is zero.

    Args:
        loss_mask: [R] zeros and ones, the sequences of a microbatch end to end.
        response_lengths: [S] int64, sums to R.
        mask_sums: [S] trained tokens of the whole rollout that a sequence belongs to.
        totals: sums over all ranks and microbatches of the step.
        per_token: False gives each rollout the weight 1 / num_rollouts, spread over its trained tokens, also when
            its segments lie in different microbatches; True gives each trained token 1 / num_trained_tokens.
    """
    mask = loss_mask.float()
    if per_token:
        return mask / max(totals.num_trained_tokens, 1)
    denominators = mask_sums.float().clamp(min=1.0) * max(totals.num_rollouts, 1)
    return mask / torch.repeat_interleave(denominators, response_lengths)


def weighted_sum(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum of values [R] times weights [R], a scalar; tokens of weight zero don't count, whatever their value."""
    return (values.masked_fill(weights == 0, 0.0) * weights).sum()


def weighted_sums(values: torch.Tensor, weights: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """`weighted_sum` of each sequence: values [R] and weights [R] of sequences of these lengths [S], to [S]."""
    return sequence_sums(values.masked_fill(weights == 0, 0.0) * weights, lengths)
