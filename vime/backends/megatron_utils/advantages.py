"""Advantages of a whole rollout batch on one rank, before its first optimizer step.

Group-relative advantages come with the plan. Whatever tells tokens apart (a KL penalty, discounted returns, a function
of the user's own) or looks at all ranks (whitening) is computed here, on the CPU, from each rank's own sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

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
from vime.data.lazy import PreparedMicrobatches, token_counts, without_candidates
from vime.errors import TrainerError

Estimate = Callable[[PackedMicrobatch, ObjectiveConfig], Advantages]


def with_token_advantages(
    steps: Sequence[Sequence[PackedMicrobatch]], config: ObjectiveConfig, sum_over_replicas: Reduce
) -> list[PreparedMicrobatches]:
    """The same microbatches with `token_advantages` and `token_returns`; collective when `config` whitens.

    In this order: the estimator or the user's function, distillation, whitening. Microbatches are read one at a time,
    without candidates; what stays in memory is per token. A function of the user's is given the whole rollout batch.

    Args:
        steps: this rank's microbatches of each optimizer step of the rollout batch.
        config: the objective.
        sum_over_replicas: sum over the data-parallel ranks, which hold different sequences.

    Raises `TrainerError` where reference or teacher log-probabilities or the critic's values are missing or a function
    of the user's returns the wrong shape, and `SampleError` when there is nothing to whiten.
    """
    sources = [without_candidates(step) for step in steps]
    found = _advantages(sources, config)
    if config.normalize_advantages:
        found = _whitened(found, [mask_of(batch) for batch in _each(sources)], sum_over_replicas)
    results = iter(
        [{"token_advantages": item.advantages.numpy(), "token_returns": item.returns.numpy()} for item in found]
    )
    return [PreparedMicrobatches(step, [next(results) for _ in token_counts(step)]) for step in steps]


def _each(steps: Sequence[Sequence[PackedMicrobatch]]) -> Iterator[PackedMicrobatch]:
    return (batch for step in steps for batch in step)


def _advantages(steps: Sequence[Sequence[PackedMicrobatch]], config: ObjectiveConfig) -> list[Advantages]:
    """Of each microbatch, before whitening."""
    coef = config.opd_kl_coef
    if config.custom_advantages is None:
        estimate = ESTIMATES[config.estimator]
        found: Iterable[tuple[PackedMicrobatch, Advantages]] = (
            (batch, estimate(batch, config)) for batch in _each(steps)
        )
    else:
        own = custom_advantages(_each(steps), config, config.custom_advantages)
        if coef is None:
            return own
        found = zip(_each(steps), own, strict=True)
    return [item if coef is None else _distilled(batch, item, config, coef) for batch, item in found]


def _distilled(batch: PackedMicrobatch, found: Advantages, config: ObjectiveConfig, coef: float) -> Advantages:
    student, teacher = old_log_probs_of(batch, config), batch.teacher_log_probs
    if student is None or teacher is None:
        raise TrainerError(
            f"samples {batch.sample_indices.tolist()} have no teacher log-probabilities, "
            "allowed: one for each response token.",
            next_step="Look at the teacher's answers, or leave out --use-opd.",
        )
    advantages, _ = distilled(found.advantages, torch.tensor(student), torch.tensor(teacher), coef=coef)
    return Advantages(advantages, found.returns)


def _whitened(
    found: Sequence[Advantages], masks: Sequence[torch.Tensor], sum_over_replicas: Reduce
) -> list[Advantages]:
    whitened = whiten(torch.cat([item.advantages for item in found]), torch.cat(list(masks)), sum_over_replicas)
    parts = pieces(whitened, [len(item.advantages) for item in found])
    return [Advantages(part, item.returns) for part, item in zip(parts, found, strict=True)]


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
