"""The glue between the formulas and Megatron's forward-backward schedules."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from vime.algorithms.aggregate import token_weights, weighted_sum
from vime.algorithms.policy_loss import clipped_policy_loss
from vime.backends.megatron_utils.config import TrainerConfig
from vime.backends.megatron_utils.packing import MicrobatchTensors
from vime.data.batch import StepTotals

METRIC_NAMES = (
    "loss",
    "pg_loss",
    "pg_clipfrac",
    "ppo_kl",
    "ois",
    "entropy",
    "train_rollout_logprob_abs_diff",
    "num_tokens",
)
"""Sums over microbatches and ranks; all but the last are already divided by the step's denominator."""


@dataclass
class StepLoss:
    """Loss of the microbatches of one step on one rank, and what is reported about it.

    `backward_scale` undoes the averages that Megatron takes: over the microbatches of this rank (the schedule divides
    the loss in place) and over data-parallel ranks (the gradient buffers are divided). What remains is exactly the
    sum over all sequences of the step with the weights of `token_weights`, under any split.
    """

    config: TrainerConfig
    totals: StepTotals
    backward_scale: float
    metrics: list[torch.Tensor] = field(default_factory=list)
    """[len(METRIC_NAMES)] float32 of each microbatch, in order."""
    sample_indices: list[tuple[int, ...]] = field(default_factory=list)
    """Samples of each microbatch, in order."""

    def __call__(
        self, microbatch: MicrobatchTensors, log_probs: torch.Tensor, entropies: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return (loss for the schedule, nothing to report through it) for log-probs and entropies [R]."""
        config, mask = self.config, microbatch.loss_mask
        weights = token_weights(
            mask,
            microbatch.response_lengths,
            microbatch.mask_sums,
            self.totals,
            per_token=config.calculate_per_token_loss,
        )
        current = log_probs.detach()
        old = microbatch.sampler_log_probs if config.use_rollout_logprobs else current
        policy = clipped_policy_loss(
            log_probs,
            old.where(mask, current),  # tokens that aren't trained: ratio one, so that nothing overflows
            microbatch.advantages,
            eps_clip=config.eps_clip,
            eps_clip_high=config.eps_clip_high,
            eps_clip_c=config.eps_clip_c,
        )
        pg_loss = weighted_sum(policy.loss, weights)
        loss = pg_loss
        if config.entropy_coef:
            loss = loss - config.entropy_coef * weighted_sum(entropies, weights)
        difference = (microbatch.sampler_log_probs - current).abs()
        reduced = [
            weighted_sum(values.detach(), weights)
            for values in (policy.clipped, policy.ppo_kl, policy.ois, entropies, difference)
        ]
        self.metrics.append(torch.stack([loss.detach(), pg_loss.detach(), *reduced, mask.sum().float()]))
        self.sample_indices.append(microbatch.sample_indices)
        return loss * self.backward_scale, {}
