"""A loss of the user's own (--custom-loss-function-path): `f(args, batch, log_probs, entropies, reduce)`.

`args` is the flat view of the settings. `batch` is a dict of lists with one entry for each sequence: total_lengths,
response_lengths, sample_indices, and one tensor [response tokens] each in loss_masks, advantages, rollout_log_probs
and, where there are such, log_probs (of the trainer before the batch's first step), ref_log_probs and
teacher_log_probs. `log_probs` and `entropies` [R] are those of the policy at this moment, of all sequences end to end,
differentiable. `reduce` makes of values [R] the number that a step reports: the mean over samples, or over tokens with
--calculate-per-token-loss, without masked tokens; sums of it over microbatches and ranks are exact.

The function returns the loss, a scalar that depends on `log_probs` or `entropies` and is divided by what `reduce`
divides by, and a dict of scalars to report. Under context parallelism each rank sees its own tokens of the responses.
"""

from __future__ import annotations

from typing import Any

import torch

from vime.algorithms.aggregate import token_weights, weighted_sum
from vime.algorithms.loss_tokens import LossTokens
from vime.algorithms.objective_config import CustomLoss
from vime.algorithms.ragged import pieces
from vime.data.batch import StepTotals
from vime.errors import TrainerError

_FLAG = "--custom-loss-function-path"


def custom_objective(
    function: CustomLoss,
    args: Any,
    totals: StepTotals,
    tokens: LossTokens,
    log_probs: torch.Tensor,
    entropies: torch.Tensor,
    *,
    per_token: bool,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, metrics) of one microbatch by the user's function; the metrics are detached and have the loss among them.

    Raises `TrainerError` for a loss that isn't a differentiable scalar, or a metric that isn't a scalar.
    """
    mask = tokens.loss_mask
    weights = token_weights(mask, tokens.response_lengths, tokens.mask_sums, totals, per_token=per_token)

    def reduce(values: torch.Tensor) -> torch.Tensor:
        return weighted_sum(values, weights)

    loss, metrics = function(args, _batch(tokens), log_probs, entropies, reduce)
    _check("a loss", loss)
    if not loss.requires_grad:
        raise TrainerError(
            f"{_FLAG} returned a loss that depends on no parameter, allowed: one made of log_probs or entropies.",
            next_step="Correct the function.",
        )
    for name, value in metrics.items():
        _check(f"the metric {name}", value)
    return loss, {**{name: value.detach() for name, value in metrics.items()}, "loss": loss.detach()}


def _batch(tokens: LossTokens) -> dict[str, list[Any]]:
    lengths = tokens.response_lengths.tolist()
    per_token = {
        "loss_masks": tokens.loss_mask.float(),
        "advantages": tokens.advantages,
        "rollout_log_probs": tokens.sampler_log_probs,
        "log_probs": tokens.old_log_probs,
        "ref_log_probs": tokens.reference_log_probs,
        "teacher_log_probs": tokens.teacher_log_probs,
    }
    found: dict[str, list[Any]] = {
        name: pieces(values, lengths) for name, values in per_token.items() if values is not None
    }
    return {
        **found,
        "total_lengths": tokens.total_lengths.tolist(),
        "response_lengths": lengths,
        "sample_indices": list(tokens.sample_indices),
    }


def _check(what: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor) or value.shape != ():
        found = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"type {type(value).__name__}"
        raise TrainerError(
            f"{_FLAG} returned {what} of {found}, allowed: a tensor with one number.",
            next_step="Reduce it with the function's last argument.",
        )
