"""Advantages of a whole rollout batch on one rank, before its first optimizer step.

Group-relative advantages come with the plan. Whatever tells tokens apart (a KL penalty, discounted returns, a function
of the user's own) or looks at all ranks (whitening) is computed here, on the CPU, from each rank's own sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vime.algorithms.advantages import (
    Advantages,
    distilled,
    generalized_advantages,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from vime.algorithms.kl import kl_terms
from vime.algorithms.objective_config import Estimator, ObjectiveConfig
from vime.algorithms.ragged import Reduce, pieces, spread
from vime.algorithms.whitening import whiten
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
        found = _custom(batches, config, config.custom_advantages)
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
    student, teacher = _old_log_probs(batch, config), batch.teacher_log_probs
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
    mask = torch.cat([_mask(batch) for batch in batches])
    whitened = whiten(torch.cat(list(advantages)), mask, sum_over_replicas)
    return pieces(whitened, [len(values) for values in advantages])


def _old_log_probs(batch: PackedMicrobatch, config: ObjectiveConfig) -> npt.NDArray[np.float32] | None:
    """[R] of the policy that the samples count as made by."""
    return batch.sampler_log_probs if config.use_rollout_logprobs else batch.old_log_probs


def _mask(batch: PackedMicrobatch) -> torch.Tensor:
    return torch.tensor(batch.loss_mask, dtype=torch.bool)


def _lengths(batch: PackedMicrobatch) -> torch.Tensor:
    return torch.tensor(batch.response_lengths, dtype=torch.int64)


def _rewards(batch: PackedMicrobatch) -> torch.Tensor:
    return torch.tensor(batch.advantages, dtype=torch.float32)


def _kl(batch: PackedMicrobatch, config: ObjectiveConfig) -> torch.Tensor:
    """KL estimate of each token [R] between old and reference policy, zeros without a penalty."""
    if config.kl_coef == 0.0:
        return torch.zeros(len(batch.loss_mask))
    old = _old_log_probs(batch, config)
    if old is None or batch.reference_log_probs is None:
        raise TrainerError(
            "the rewards carry a KL penalty, but the batch has no reference log-probabilities.",
            next_step="Give --ref-load, or leave out --kl-coef.",
        )
    return kl_terms(torch.tensor(old), torch.tensor(batch.reference_log_probs), config.kl_kind)


def _of_the_sequence(batch: PackedMicrobatch, _: ObjectiveConfig) -> Advantages:
    advantages = spread(_rewards(batch), _lengths(batch))
    return Advantages(advantages, advantages)


def _reinforce_plus_plus(batch: PackedMicrobatch, config: ObjectiveConfig) -> Advantages:
    kl, mask, lengths = _kl(batch, config), _mask(batch), _lengths(batch)
    return reinforce_plus_plus(_rewards(batch), kl, mask, lengths, kl_coef=config.kl_coef, gamma=config.gamma)


def _reinforce_plus_plus_baseline(batch: PackedMicrobatch, config: ObjectiveConfig) -> Advantages:
    kl, mask, lengths = _kl(batch, config), _mask(batch), _lengths(batch)
    return reinforce_plus_plus_baseline(_rewards(batch), kl, mask, lengths, kl_coef=config.kl_coef)


def _generalized(batch: PackedMicrobatch, config: ObjectiveConfig) -> Advantages:
    if batch.values is None:
        raise TrainerError(
            f"samples {batch.sample_indices.tolist()} have no values of a critic, allowed: one for each token.",
            next_step="Choose another --advantage-estimator.",
        )
    return generalized_advantages(
        _rewards(batch),
        _kl(batch, config),
        torch.tensor(batch.values),
        _mask(batch),
        _lengths(batch),
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


def _custom(
    batches: Sequence[PackedMicrobatch], config: ObjectiveConfig, function: Callable[[Any, dict[str, Any]], None]
) -> list[Advantages]:
    """Advantages of each microbatch from the user's function, which is called once for the rank's sequences."""
    data = _rollout_data(batches, config)
    function(config.hook_args, data)
    expected = data["response_lengths"]
    for name in ("advantages", "returns"):
        found = [len(values) for values in data.get(name, ())]
        if found != expected:
            raise TrainerError(
                f"--custom-advantage-function-path left rollout_data[{name!r}] with lengths {found}, "
                f"allowed: {expected}, one tensor for each sequence with one value for each response token.",
                next_step="Correct the function.",
            )
    sizes = [len(batch.loss_mask) for batch in batches]
    advantages, returns = (
        pieces(torch.cat([torch.as_tensor(item, dtype=torch.float32) for item in data[name]]), sizes)
        for name in ("advantages", "returns")
    )
    return [Advantages(*pair) for pair in zip(advantages, returns, strict=True)]


def _rollout_data(batches: Sequence[PackedMicrobatch], config: ObjectiveConfig) -> dict[str, Any]:
    """What a custom function reads and writes: lists with one entry per sequence."""
    per_token: dict[str, list[torch.Tensor]] = {"loss_masks": [], "rollout_log_probs": [], "kl": []}
    data: dict[str, Any] = {"tokens": [], "response_lengths": [], "total_lengths": [], "rewards": []}
    data["sample_indices"] = []
    for batch in batches:
        lengths = _lengths(batch).tolist()
        totals = torch.tensor(batch.cu_seqlens, dtype=torch.int64).diff().tolist()
        data["response_lengths"] += lengths
        data["total_lengths"] += totals
        data["tokens"] += pieces(torch.tensor(batch.tokens, dtype=torch.int64), totals)
        data["rewards"] += _rewards(batch).tolist()
        data["sample_indices"] += batch.sample_indices.tolist()
        per_token["loss_masks"] += pieces(_mask(batch).int(), lengths)
        per_token["rollout_log_probs"] += pieces(torch.tensor(batch.sampler_log_probs), lengths)
        per_token["kl"] += pieces(_kl(batch, config), lengths)
        optional = {
            "log_probs": batch.old_log_probs,
            "ref_log_probs": batch.reference_log_probs,
            "teacher_log_probs": batch.teacher_log_probs,
            "values": batch.values,
        }
        for name, values in optional.items():
            if values is not None:
                per_token.setdefault(name, []).extend(pieces(torch.tensor(values), lengths))
    return {**data, **per_token}
