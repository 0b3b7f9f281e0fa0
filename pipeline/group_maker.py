"""The members of a group, made together, checked, and put into their stored form."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.failed_groups import Failure
from pipeline.group_start import anew, is_done
from pipeline.sample_maker import SampleMaker
from storage.checks import EnqueueRequirements, check_sample
from storage.columns import EncodedGroup, encode_group
from storage.summary import GroupSummary, summarize
from vime.errors import GenerationAborted
from vime.rollout.rewards import GroupRewardFunction, reward_value, score_group
from vime.utils.types import Sample


@dataclass(frozen=True)
class GroupSettings:
    """The settings that a group depends on, besides those of its samples."""

    reward_timeout_s: float
    reward_key: str | None
    needs: EnqueueRequirements
    """What training needs of each sample."""
    sc_dtype: str
    """Stored type of the candidates' log-probabilities."""


@dataclass(frozen=True)
class MadeGroup:
    """A finished group in its stored form."""

    samples: list[Sample]
    group: EncodedGroup
    summary: GroupSummary


class GroupMaker:
    """Makes groups of samples, any number at once."""

    def __init__(
        self,
        settings: GroupSettings,
        samples: SampleMaker,
        hook_args: Any,
        group_reward: GroupRewardFunction | None = None,
    ) -> None:
        """`group_reward` is called once for all members of a group; `samples` then has no reward of its own."""
        self._settings, self._samples = settings, samples
        self._hook_args, self._group_reward = hook_args, group_reward

    async def make(self, start: Sequence[Sample]) -> MadeGroup | list[Failure]:
        """Generate and score the members together; the first failure cancels the rest.

        What can't be trained or stored fails here, where it costs no other group. Raises `GenerationAborted`.
        """
        samples = [sample if is_done(sample) else anew(sample) for sample in start]
        failures = await self._make_members([sample for sample in samples if not is_done(sample)])
        failures = failures or await self._score(samples)
        return failures or await asyncio.to_thread(self._check_and_encode, samples)

    async def _make_members(self, samples: list[Sample]) -> list[Failure]:
        """Generate and score; what failed. Raises `GenerationAborted` when nothing else went wrong."""
        tasks = [asyncio.create_task(self._samples.make(sample)) for sample in samples]
        if not tasks:
            return []
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        failures, aborted = [], None
        for sample, task in zip(samples, tasks, strict=True):
            error = None if task.cancelled() else task.exception()
            if isinstance(error, GenerationAborted):
                aborted = error
            elif isinstance(error, Exception):
                failures.append(Failure([sample], error))
        if aborted is not None and not failures:
            raise aborted
        return failures

    async def _score(self, samples: list[Sample]) -> list[Failure]:
        """Reward all members by one call, where the settings say so; a failure is that of the whole group."""
        if self._group_reward is None:
            return []
        started = time.monotonic()
        try:
            await score_group(self._group_reward, self._hook_args, samples, timeout_s=self._settings.reward_timeout_s)
        except Exception as error:  # the boundary to what the reward returned
            return [Failure(samples, error)]
        for sample in samples:
            sample.non_generation_time += time.monotonic() - started
        return []

    def _check_and_encode(self, samples: list[Sample]) -> MadeGroup | list[Failure]:
        """Takes 0.1 s of processor time for long samples with routes: apart from the loop that keeps requests going."""
        failures = [Failure([s], error) for s in samples if (error := self._fault(s)) is not None]
        if failures:
            return failures
        try:
            return MadeGroup(samples, self._encode(samples), summarize(samples, reward_key=self._settings.reward_key))
        except Exception as error:  # the boundary to what user code left in the samples
            return [self._of_one_sample(samples, error)]

    def _fault(self, sample: Sample) -> Exception | None:
        """Why a generated sample can't be trained on."""
        try:
            check_sample(sample, self._settings.needs)
            reward_value(sample, self._settings.reward_key)
        except Exception as error:  # the boundary to what user code left in the sample
            return error
        return None

    def _encode(self, samples: Sequence[Sample]) -> EncodedGroup:
        routes = self._settings.needs.routes
        return encode_group(
            samples,
            reward_key=self._settings.reward_key,
            sc_dtype=self._settings.sc_dtype,
            num_experts=None if routes is None else routes.num_experts,
        )

    def _of_one_sample(self, samples: list[Sample], error: Exception) -> Failure:
        """The failure to store a group, as that of the one sample that can't be stored by itself, if there is one."""
        for sample in samples:
            try:
                self._encode([sample])
            except Exception as its_error:  # the boundary to what user code left in the sample
                return Failure([sample], its_error)
        return Failure(samples, error)
