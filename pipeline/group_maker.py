"""The members of a group, made together, checked, and put into their stored form."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.activity import ActivityBoard, Phase
from pipeline.failed_groups import Failure
from pipeline.group_start import anew, can_continue, is_done, is_generated, redone
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
    continues_aborted: bool = False
    """An aborted member keeps what it has and goes on from there."""
    masks_continued: bool = False
    """What such a member had is not trained."""


@dataclass(frozen=True)
class MadeGroup:
    """A finished group in its stored form."""

    samples: list[Sample]
    group: EncodedGroup
    summary: GroupSummary


@dataclass(frozen=True)
class UnfinishedGroup:
    """A group of which some members failed or were aborted."""

    samples: list[Sample]
    """What the next attempt starts from: finished members as they are, the others as far as they are kept."""
    failures: list[Failure]
    """Empty where members were only aborted."""
    reason: str

    @property
    def has_responses(self) -> bool:
        """Whether there is anything that need not be generated again."""
        return any(sample.response_length for sample in self.samples)


class GroupMaker:
    """Makes groups of samples, any number at once."""

    def __init__(
        self,
        settings: GroupSettings,
        samples: SampleMaker,
        hook_args: Any,
        group_reward: GroupRewardFunction | None = None,
        activity: ActivityBoard | None = None,
    ) -> None:
        """`group_reward` is called once for all members of a group; `samples` then has no reward of its own."""
        self._settings, self._samples = settings, samples
        self._hook_args, self._group_reward = hook_args, group_reward
        self._activity = activity or ActivityBoard()

    @property
    def num_drifted_tokens(self) -> int:
        """See `OwnGenerate`."""
        return self._samples.num_drifted_tokens

    async def make(self, start: Sequence[Sample]) -> MadeGroup | UnfinishedGroup:
        """Generate and score the members together. Only members that aren't finished yet are worked on.

        One that fails, or is aborted, holds up no other. What can't be trained or stored fails here, where it costs no
        other group.
        """
        members = await asyncio.gather(*(self._make_member(self._begun(sample)) for sample in start))
        samples = [sample for member in members for sample in member.samples]
        failures = [member.failure for member in members if member.failure is not None]
        aborted = [member.aborted for member in members if member.aborted is not None]
        if failures or aborted:
            return UnfinishedGroup(samples, failures, aborted[0] if not failures else str(failures[0].error))
        failures = await self._score(samples)
        if not failures:
            outcome = await asyncio.to_thread(self._check_and_encode, samples)
            if isinstance(outcome, MadeGroup):
                return outcome
            failures = outcome
        failed = {id(sample) for failure in failures for sample in failure.samples}
        return UnfinishedGroup(redone(samples, failed), failures, str(failures[0].error))

    def _begun(self, sample: Sample) -> Sample:
        """What an attempt at a member starts from."""
        if is_generated(sample):
            return sample
        if not (self._settings.continues_aborted and can_continue(sample)):
            return anew(sample)
        if self._settings.masks_continued:
            sample.loss_mask = [0] * sample.response_length
        return sample

    async def _make_member(self, sample: Sample) -> _Member:
        if is_done(sample) or (is_generated(sample) and self._group_reward is not None):
            return _Member([sample])
        fresh = anew(sample)  # before a function of the user's own writes into its metadata
        try:
            return _Member(await self._samples.make(sample))
        except GenerationAborted as error:
            kept = self._settings.continues_aborted and can_continue(sample)
            return _Member([sample if kept else fresh], aborted=f"aborted: {error.message}")
        except Exception as error:  # the boundary to engines and user code: whatever it is, the others go on
            return _Member([fresh], failure=Failure([sample], error))

    async def _score(self, samples: list[Sample]) -> list[Failure]:
        """Reward all members by one call, where the settings say so; a failure is that of the whole group."""
        if self._group_reward is None:
            return []
        started = time.monotonic()
        try:
            with self._activity.doing(Phase.REWARD, samples[0].group_index or 0, samples):
                timeout_s = self._settings.reward_timeout_s
                await score_group(self._group_reward, self._hook_args, samples, timeout_s=timeout_s)
        except Exception as error:  # the boundary to what the reward returned
            return [Failure(samples, error)]
        for sample in samples:
            sample.non_generation_time += time.monotonic() - started
        return []

    def encode(self, samples: Sequence[Sample]) -> EncodedGroup:
        """The stored form of samples, finished or not. Raises `SampleError` for what can't be stored."""
        routes = self._settings.needs.routes
        return encode_group(
            samples,
            reward_key=self._settings.reward_key,
            sc_dtype=self._settings.sc_dtype,
            num_experts=None if routes is None else routes.num_experts,
        )

    def _check_and_encode(self, samples: list[Sample]) -> MadeGroup | list[Failure]:
        """Takes 0.1 s of processor time for long samples with routes: apart from the loop that keeps requests going."""
        failures = [Failure([s], error) for s in samples if (error := self._fault(s)) is not None]
        if failures:
            return failures
        try:
            return MadeGroup(samples, self.encode(samples), summarize(samples, reward_key=self._settings.reward_key))
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

    def _of_one_sample(self, samples: list[Sample], error: Exception) -> Failure:
        """The failure to store a group, as that of the one sample that can't be stored by itself, if there is one."""
        for sample in samples:
            try:
                self.encode([sample])
            except Exception as its_error:  # the boundary to what user code left in the sample
                return Failure([sample], its_error)
        return Failure(samples, error)


@dataclass(frozen=True)
class _Member:
    """What became of one member."""

    samples: list[Sample]
    failure: Failure | None = None
    aborted: str | None = None
