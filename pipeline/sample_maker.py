"""One sample, from its prompt to its reward; needs no queue."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.activity import ActivityBoard, Phase
from pipeline.group_start import is_generated
from pipeline.request_gate import RequestGate
from vime.backends.vllm_utils.protocol import Sampler
from vime.rollout.generate import HandOver
from vime.rollout.own_generate import OwnGenerate
from vime.rollout.rewards import RewardFunction, score
from vime.rollout.sample_hooks import SampleHooks
from vime.rollout.sampling import SamplingSettings
from vime.utils.types import Sample


class Generator(Protocol):
    """What fills a sample, by asking an engine or without one."""

    async def generate(
        self,
        engine: Any,
        sample: Sample,
        sampling: SamplingSettings,
        *,
        cache_salt: str | None,
        evaluation: bool,
        hand_over: HandOver | None = None,
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
    generate_function_path: str | None = None
    """Import path of the function that generates, unless a sample names its own; None: vime's own generation."""


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
        own: OwnGenerate | None = None,
        hooks: SampleHooks | None = None,
        activity: ActivityBoard | None = None,
    ) -> None:
        """Without `reward` samples come out unscored: their group is scored as a whole, elsewhere.

        `own` calls generate functions, `hooks` those of each sample; without them there are none. What samples
        are at is noted on `activity`.
        """
        self._settings, self._gate, self._generator = settings, gate, generator
        self._reward, self._hook_args, self._teacher = reward, hook_args, teacher
        self._own, self._hooks = own, hooks
        self._activity = activity or ActivityBoard()

    @property
    def num_drifted_tokens(self) -> int:
        """See `OwnGenerate`."""
        return 0 if self._own is None else self._own.num_drifted_tokens

    async def make(
        self, sample: Sample, *, sampling: SamplingSettings | None = None, evaluation: bool = False
    ) -> list[Sample]:
        """Generate `sample`, or go on with it, and score it; what came of it, in place. `sampling` None is the run's.

        A generate function of the user's own may make several of it, the segments of one rollout, or another one. In
        evaluation nothing is asked of the engine, or of a teacher, that only training needs.

        Raises:
            GenerationAborted: the engine aborted the request; the sample has what was generated until then.
            EngineError: the engine failed or could not be reached.
            SampleError: the prompt can't be generated from, or a function of the user's own failed.
            RewardError: the reward failed, or is none that can be trained; its `reason` says which.
        """
        samples = [sample]
        if not is_generated(sample):
            with self._activity.doing(Phase.GENERATING, sample.group_index or 0, samples):
                samples = await self._generated(sample, sampling or self._settings.sampling, evaluation=evaluation)
        if self._reward is not None:
            await asyncio.gather(*(self._score(self._reward, each) for each in samples if each.reward is None))
        return samples

    async def _generated(self, sample: Sample, sampling: SamplingSettings, *, evaluation: bool) -> list[Sample]:
        asked = sampling.changed(sample.metadata.get("sampling_params") or {}, evaluation=evaluation)
        samples = await self._by_function(sample, asked, evaluation=evaluation)
        if samples is None:
            await self._ask(sample, asked, evaluation=evaluation)
            samples = [sample]
        if self._hooks is not None:
            samples = [await self._hooks(each, evaluation=evaluation) for each in samples]
        if self._teacher is not None and not evaluation:
            await asyncio.gather(*map(self._teacher.score, samples))
        return samples

    async def _by_function(
        self, sample: Sample, sampling: SamplingSettings, *, evaluation: bool
    ) -> list[Sample] | None:
        """What the user's function makes; None where there is none."""
        path = sample.generate_function_path or self._settings.generate_function_path
        if path is None or self._own is None:
            return None

        async def ask(its: Sample, its_sampling: SamplingSettings, hand_over: HandOver | None = None) -> None:
            await self._ask(its, its_sampling, evaluation=evaluation, hand_over=hand_over)

        with self._gate.busy():
            await self._gate.opened()
            return await self._own.generate(path, sample, sampling, ask, evaluation=evaluation)

    async def _ask(
        self, sample: Sample, sampling: SamplingSettings, *, evaluation: bool, hand_over: HandOver | None = None
    ) -> None:
        streamed = {} if hand_over is None else {"hand_over": hand_over}

        async def generate(engine: Sampler | None, policy_version: int) -> None:
            salt = f"v{policy_version}" if self._settings.salt_by_version else None
            await self._generator.generate(engine, sample, sampling, cache_salt=salt, evaluation=evaluation, **streamed)

        await self._gate.request(sample.group_index or 0, generate)

    async def _score(self, reward: RewardFunction, sample: Sample) -> None:
        started, settings = time.monotonic(), self._settings
        with self._activity.doing(Phase.REWARD, sample.group_index or 0, [sample]):
            await score(reward, self._hook_args, sample, timeout_s=settings.reward_timeout_s, key=settings.reward_key)
        sample.non_generation_time += time.monotonic() - started
