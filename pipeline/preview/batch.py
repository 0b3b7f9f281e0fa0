"""The effective batch: what one rollout batch and one optimizer step consist of. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from vime.settings.groups import Settings
from vime.settings.rules.quantities import context_parallel_size


@dataclass(frozen=True)
class EffectiveBatch:
    """Sizes of one rollout batch. Token limits are None where nothing limits them."""

    num_rollouts: int
    groups: int
    samples_per_group: int
    samples: int
    steps_per_rollout: int
    samples_per_step: int
    samples_per_rank: float
    """Samples of one optimizer step on one data-parallel rank, on average."""
    microbatch_tokens: int | None
    """Most tokens of a microbatch; None: a fixed number of samples."""
    microbatch_samples: int | None
    """Samples of a microbatch; None: as many as fit."""
    optimizer_steps: int


def microbatch_tokens(settings: Settings) -> int | None:
    """Token limit of a microbatch, whose sequences are spread over the ranks of context parallelism."""
    trainer = settings.trainer
    if not trainer.use_dynamic_batch_size or trainer.max_tokens_per_gpu is None:
        return None
    return trainer.max_tokens_per_gpu * context_parallel_size(settings)


def effective_batch(settings: Settings, data_parallel_size: int) -> EffectiveBatch:
    data, trainer = settings.data, settings.trainer
    per_step = data.samples_per_step
    steps = data.samples_per_rollout // per_step
    dynamic = trainer.use_dynamic_batch_size
    return EffectiveBatch(
        num_rollouts=data.num_rollout or 0,
        groups=data.rollout_batch_size or 0,
        samples_per_group=data.n_samples_per_prompt,
        samples=data.samples_per_rollout,
        steps_per_rollout=steps,
        samples_per_step=per_step,
        samples_per_rank=per_step / data_parallel_size,
        microbatch_tokens=microbatch_tokens(settings),
        microbatch_samples=None if dynamic else trainer.micro_batch_size,
        optimizer_steps=(data.num_rollout or 0) * steps,
    )
