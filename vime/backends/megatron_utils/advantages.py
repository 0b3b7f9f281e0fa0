"""Advantages of a whole rollout batch on one rank, before its first optimizer step.

Group-relative advantages come with the plan. Whatever tells tokens apart (a KL penalty, discounted returns, a function
of the user's own) or looks at all ranks (whitening) is computed here, on the CPU, from each rank's own sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from vime.algorithms.advantages import (
    Advantages,
    distilled,
    generalized_advantages,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from vime.algorithms.objective_config import Estimator, ObjectiveConfig
from vime.algorithms.ragged import Reduce, pieces, spread
from vime.algorithms.whitening import whiten
from vime.backends.megatron_utils.custom_advantages import custom_advantages
from vime.backends.megatron_utils.sequences import kl_of, lengths_of, mask_of, old_log_probs_of, rewards_of
from vime.data.batch import PackedMicrobatch
from vime.errors import TrainerError

Estimate = Callable[[PackedMicrobatch, ObjectiveConfig], Advantages]


def with_token_advantages(
    steps: Sequence[Sequence[PackedMicrobatch]], config: ObjectiveConfig, sum_over_replicas: Reduce
) -> list[list[PackedMicrobatch]]:
    """The same microbatches with `token_advantages` and `token_returns`; collective when `config` whitens.

    In this order: the estimator or the user's function, distillation, whitening.

    Args:
        steps: this rank's microbatches of each optimizer step of the rollout batch.
        config: the objective.
        sum_over_replicas: sum over the data-parallel ranks, which hold different sequences.

    Raises `TrainerError` where reference or teacher log-probabilities or the critic's values are missing or a function
    of the user's returns the wrong shape, and `SampleError` when there is nothing to whiten.
    """
    batches = [batch for step in steps for batch in step]
    if config.custom_advantages is not None:
        found = custom_advantages(batches, config, config.custom_advantages)
    else:
        found = [ESTIMATES[config.estimator](batch, config) for batch in batches]
    advantages = [item.advantages for item in found]
    if config.opd_kl_coef is not None:
        advantages = [
            _distilled(batch, values, config, config.opd_kl_coef)
            for batch, values in zip(batches, advantages, strict=True)
        ]
    if config.normalize_advantages:
        advantages = _whitened(batches, advantages, sum_over_replicas)
    ready = iter(
        [
            dataclasses.replace(batch, token_advantages=values.numpy(), token_returns=item.returns.numpy())
            for batch, values, item in zip(batches, advantages, found, strict=True)
        ]
    )
    return [[next(ready) for _ in step] for step in steps]


def _distilled(batch: PackedMicrobatch, advantages: torch.Tensor, config: ObjectiveConfig, coef: float) -> torch.Tensor:
    student, teacher = old_log_probs_of(batch, config), batch.teacher_log_probs
    if student is None or teacher is None:
        raise TrainerError(
            f"samples {batch.sample_indices.tolist()} have no teacher log-probabilities, "
            "allowed: one for each response token.",
            next_step="Look at the teacher's answers, or leave out --use-opd.",
        )
    return distilled(advantages, torch.tensor(student), torch.tensor(teacher), coef=coef)[0]


def _whitened(
    batches: Sequence[PackedMicrobatch], advantages: Sequence[torch.Tensor], sum_over_replicas: Reduce
) -> list[torch.Tensor]:
    mask = torch.cat([mask_of(batch) for batch in batches])
    whitened = whiten(torch.cat(list(advantages)), mask, sum_over_replicas)
    return pieces(whitened, [len(values) for values in advantages])


def _of_the_sequence(batch: PackedMicrobatch, _: ObjectiveConfig) -> Advantages:
    advantages = spread(rewards_of(batch), lengths_of(batch))
    return Advantages(advantages, advantages)


def _reinforce_plus_plus(batch: PackedMicrobatch, config: ObjectiveConfig) -> Advantages:
    kl, mask, lengths = kl_of(batch, config), mask_of(batch), lengths_of(batch)
    return reinforce_plus_plus(rewards_of(batch), kl, mask, lengths, kl_coef=config.kl_coef, gamma=config.gamma)


def _reinforce_plus_plus_baseline(batch: PackedMicrobatch, config: ObjectiveConfig) -> Advantages:
    kl, mask, lengths = kl_of(batch, config), mask_of(batch), lengths_of(batch)
    return reinforce_plus_plus_baseline(rewards_of(batch), kl, mask, lengths, kl_coef=config.kl_coef)


def _generalized(batch: PackedMicrobatch, config: ObjectiveConfig) -> Advantages:
    if batch.values is None:
        raise TrainerError(
            f"samples {batch.sample_indices.tolist()} have no values of a critic, allowed: one for each token.",
            next_step="Choose another --advantage-estimator.",
        )
    return generalized_advantages(
        rewards_of(batch),
        kl_of(batch, config),
        torch.tensor(batch.values),
        mask_of(batch),
        lengths_of(batch),
        kl_coef=config.kl_coef,
        gamma=config.gamma,
        lambd=config.lambd,
    )


ESTIMATES: dict[Estimator, Estimate] = {
    Estimator.GRPO: _of_the_sequence,
    Estimator.GSPO: _of_the_sequence,
    Estimator.CISPO: _of_the_sequence,
    Estimator.REINFORCE_PLUS_PLUS: _reinforce_plus_plus,
    Estimator.REINFORCE_PLUS_PLUS_BASELINE: _reinforce_plus_plus_baseline,
    Estimator.PPO: _generalized,
}
