"""The glue between the formulas and Megatron's forward-backward schedules, and the documented importance weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from vime.algorithms.aggregate import token_weights, weighted_sum
from vime.algorithms.custom_loss import custom_objective
from vime.algorithms.importance import WeightKind, WeightRule, importance_weights
from vime.algorithms.objective import MicrobatchObjective
from vime.algorithms.objective_config import LossKind, ObjectiveConfig
from vime.algorithms.ragged import Reduce, on_one_rank
from vime.algorithms.score_centering import CenteringTerms
from vime.algorithms.supervised import supervised_objective
from vime.backends.megatron_utils.token_record import TokenRecord
from vime.backends.megatron_utils.whole_responses import with_whole_responses
from vime.data.batch import StepTotals

if TYPE_CHECKING:  # it loads Megatron, which users of the importance weights don't need
    from vime.backends.megatron_utils.packing import MicrobatchTensors

METRIC_NAMES = (
    "loss",
    "pg_loss",
    "pg_clipfrac",
    "ppo_kl",
    "ois",
    "entropy_loss",
    "train_rollout_logprob_abs_diff",
    "num_tokens",
)
"""Reported by the policy loss, and by others as far as they have them. Sums over microbatches and ranks; all but the
last are already divided by the step's denominator."""

OPTIONAL_METRIC_NAMES = (
    "kl_loss",
    "reward_kl",
    "mtp_loss",
    "rollout_entropy",
    "opsm_clipfrac",
    "tis",
    "tis_clipfrac",
    "tis_abs",
    "opd_reverse_kl",
    "sc_correction",
    "sc_sampler_head_mass",
    "sc_train_head_mass",
    "sc_importance_weight",
    "num_replayed_routes",
    "num_routes",
    "routing_replay_fraction",
)
"""Reported beside them where the settings ask for it; a custom weighting adds its own."""


@dataclass
class StepLoss:
    """Loss of the microbatches of one step on one rank, and what is reported about it.

    `backward_scale` undoes the averages that Megatron takes: over the microbatches of this rank (the schedule divides
    the loss in place) and over data-parallel ranks (the gradient buffers are divided). What remains is exactly the
    sum over all sequences of the step with the weights of `token_weights`, under any split.
    """

    config: ObjectiveConfig
    totals: StepTotals
    backward_scale: float
    sum_over_context: Reduce = on_one_rank
    """Sum over the ranks that hold parts of the same sequences."""
    further_scale: float = 0.0
    """Weight of the prediction of further tokens, whose loss is the mean over its depths."""
    metrics: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """Scalars by name of each microbatch, in order."""
    sample_indices: list[tuple[int, ...]] = field(default_factory=list)
    """Samples of each microbatch, in order."""
    tokens: TokenRecord = field(init=False)
    _sample_losses: list[torch.Tensor | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = TokenRecord(self.sum_over_context)

    @property
    def sample_losses(self) -> dict[int, float]:
        """Sample -> its part of the step's loss, of all samples that this rank computed a loss of; empty where the
        user's own function makes one number of all tokens."""
        found: dict[int, float] = {}
        for samples, losses in zip(self.sample_indices, self._sample_losses, strict=True):
            for sample, loss in zip(samples, [] if losses is None else losses.tolist(), strict=False):
                found[sample] = found.get(sample, 0.0) + loss
        return found

    def __call__(
        self,
        microbatch: MicrobatchTensors,
        log_probs: torch.Tensor,
        entropies: torch.Tensor,
        centering: CenteringTerms | None = None,
        further: Sequence[torch.Tensor] = (),
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return (loss for the schedule, nothing to report through it) for log-probs and entropies [R].

        `further` are the log-probabilities of each depth of the prediction of further tokens. Their loss is no part of
        the metric "loss".
        """
        if self.config.recomputes_loss:
            loss, metrics, of_samples = checkpoint(
                self._loss_of, microbatch, log_probs, entropies, centering, use_reentrant=False
            )
        else:
            loss, metrics, of_samples = self._loss_of(microbatch, log_probs, entropies, centering)
        if further:
            missed = self._further_loss(microbatch, further)
            loss, metrics = loss + self.further_scale * missed, {**metrics, "mtp_loss": missed.detach()}
        self._sample_losses.append(None if of_samples is None else self.sum_over_context(of_samples))
        self.metrics.append({**metrics, **_counts(microbatch)})
        self.sample_indices.append(microbatch.sample_indices)
        self.tokens.add(microbatch, log_probs)
        return loss * self.backward_scale, {}

    def _further_loss(self, microbatch: MicrobatchTensors, further: Sequence[torch.Tensor]) -> torch.Tensor:
        """Cross-entropy of the response tokens, weighted as in the objective; the mean over depths."""
        losses = []
        for log_probs, targets in zip(further, microbatch.further, strict=True):
            weights = token_weights(
                targets.loss_mask,
                targets.lengths,
                microbatch.mask_sums,
                self.totals,
                per_token=self.config.calculate_per_token_loss,
            )
            losses.append(weighted_sum(-log_probs, weights))
        return torch.stack(losses).mean()

    def _loss_of(
        self,
        microbatch: MicrobatchTensors,
        log_probs: torch.Tensor,
        entropies: torch.Tensor,
        centering: CenteringTerms | None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor | None]:
        """(loss, metrics, [S] parts of the loss or None) by the kind of loss."""
        config, totals, per_token = self.config, self.totals, self.config.calculate_per_token_loss
        if config.loss_kind is LossKind.SUPERVISED:
            return supervised_objective(totals, microbatch, log_probs, entropies, per_token=per_token)
        if config.custom_loss is not None:
            loss, metrics = custom_objective(
                config.custom_loss, config.hook_args, totals, microbatch, log_probs, entropies, per_token=per_token
            )
            return loss, metrics, None
        objective = MicrobatchObjective(
            with_whole_responses(config, microbatch, self.sum_over_context),
            totals,
            microbatch,
            log_probs,
            entropies,
            centering=centering,
            sum_over_context=self.sum_over_context,
        )
        loss, metrics = objective.loss_and_metrics()
        return loss, metrics, objective.sample_losses


def _counts(microbatch: MicrobatchTensors) -> dict[str, torch.Tensor]:
    counts = {"num_tokens": microbatch.loss_mask.sum().float()}
    if microbatch.routes is not None:
        counts["num_replayed_routes"] = microbatch.mask_sums.new_tensor(microbatch.routes.num_replayed)
        counts["num_routes"] = microbatch.mask_sums.new_tensor(microbatch.routes.num_needed)
    return counts


def with_replayed_fraction(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a step with the fraction of tokens whose recorded experts were replayed, where any could be."""
    needed = metrics.get("num_routes", 0.0)
    fraction = {"routing_replay_fraction": metrics["num_replayed_routes"] / needed} if needed else {}
    return {**metrics, **fraction}


def vanilla_tis_function(
    args: Any,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: list[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    **_: Any,
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """Truncated importance sampling: each token's loss times its trainer / sampler ratio, clamped.

    Args:
        args: has `tis_clip_low` and `tis_clip`.
        pg_loss: [R] of the sequences end to end.
        train_log_probs: for each sequence its response tokens under the trainer.
        rollout_log_probs: the same under the sampler.
        loss_masks: returned as they are.

    Returns (weighted loss [R], loss masks, metrics [R] by name).
    """
    rule = WeightRule(WeightKind.TIS, args.tis_clip_low, args.tis_clip)
    return _weight(rule, pg_loss, train_log_probs, rollout_log_probs, loss_masks)


def icepop_function(
    args: Any,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: list[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    **_: Any,
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """IcePop: each token's loss times its trainer / sampler ratio, and zero where that leaves the band.

    Arguments and result as in `vanilla_tis_function`; bounds that are None are 0.5 and 5.
    """
    low = 0.5 if args.tis_clip_low is None else args.tis_clip_low
    high = 5.0 if args.tis_clip is None else args.tis_clip
    return _weight(WeightRule(WeightKind.ICEPOP, low, high), pg_loss, train_log_probs, rollout_log_probs, loss_masks)


def _weight(
    rule: WeightRule,
    pg_loss: torch.Tensor,
    train_log_probs: list[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    found = importance_weights(torch.cat(train_log_probs), torch.cat(rollout_log_probs), rule)
    return pg_loss * found.weights, loss_masks, found.metrics()
