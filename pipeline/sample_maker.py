"""One sample, from its prompt to its reward; needs no queue."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.group_start import is_generated
from pipeline.request_gate import RequestGate
from vime.backends.vllm_utils.protocol import Sampler
from vime.rollout.rewards import RewardFunction, score
from vime.rollout.sampling import SamplingSettings
from vime.utils.types import Sample


class Generator(Protocol):
    """What fills a sample, by asking an engine or without one."""

    async def generate(
        self, engine: Any, sample: Sample, sampling: SamplingSettings, *, cache_salt: str | None, evaluation: bool
    ) -> None: ...


class Teacher(Protocol):
    """What scores a generated sample for on-policy distillation."""

    async def score(self, sample: Sample) -> None: ...


@dataclass(frozen=True)
class MakerSettings:
    """The settings that a sample depends on."""

    sampling: SamplingSettings
    reward_timeout_s: float
    reward_key: str | None
    salt_by_version: bool


class SampleMaker:
    """Makes samples of training and of evaluation, any number at once."""

    def __init__(
        self,
        settings: MakerSettings,
        gate: RequestGate,
        generator: Generator,
        reward: RewardFunction | None,
        hook_args: Any,
        teacher: Teacher | None = None,
    ) -> None:
        """Without `reward` samples come out unscored: their group is scored as a whole, elsewhere."""
        self._settings, self._gate, self._generator = settings, gate, generator
        self._reward, self._hook_args, self._teacher = reward, hook_args, teacher

    async def make(
        self, sample: Sample, *, sampling: SamplingSettings | None = None, evaluation: bool = False
    ) -> list[Sample]:
        """Generate `sample`, or go on with it, and score it; what came of it, in place. `sampling` None is the run's.

        In evaluation nothing is asked of the engine, or of a teacher, that only training needs.

        Raises:
            GenerationAborted: the engine aborted the request; the sample has what was generated until then.
            EngineError: the engine failed or could not be reached.
            SampleError: the prompt can't be generated from.
            RewardError: the reward failed, or is none that can be trained; its `reason` says which.
        """
        if not is_generated(sample):
            await self._generate(sample, sampling or self._settings.sampling, evaluation=evaluation)
        if self._reward is not None and sample.reward is None:
            await self._score(self._reward, sample)
        return [sample]

    async def _generate(self, sample: Sample, sampling: SamplingSettings, *, evaluation: bool) -> None:
        async def generate(engine: Sampler | None, policy_version: int) -> None:
            salt = f"v{policy_version}" if self._settings.salt_by_version else None
            await self._generator.generate(engine, sample, sampling, cache_salt=salt, evaluation=evaluation)

        await self._gate.request(sample.group_index or 0, generate)
        if self._teacher is not None and not evaluation:
            await self._teacher.score(sample)

    async def _score(self, reward: RewardFunction, sample: Sample) -> None:
        started, settings = time.monotonic(), self._settings
        await score(reward, self._hook_args, sample, timeout_s=settings.reward_timeout_s, key=settings.reward_key)
        sample.non_generation_time += time.monotonic() - started
