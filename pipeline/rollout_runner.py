"""--rollout-function-path: rollouts by a function of the user's own, over the queue as its data source."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pipeline.failed_groups import FailedGroups, Failure, most_telling
from pipeline.group_maker import GroupMaker, MadeGroup
from pipeline.group_stamps import inherit_stamps
from pipeline.messages import ProducerStats, Work
from pipeline.producer_counts import ProducerCounts
from pipeline.queue_data_source import MAX_GROUPS_PER_CALL, QueueDataSource
from pipeline.request_gate import RequestGate
from vime.errors import FailedSampleError, RunFailedError, VimeError
from vime.rollout.base_types import RolloutFnTrainOutput, flat_group
from vime.rollout.group_collector import Attempt, Group, GroupCollector
from vime.rollout.rollout_call import RolloutCall, bind
from vime.settings.import_paths import load_function
from vime.utils.types import Sample

logger = logging.getLogger(__name__)

FLAG = "--rollout-function-path"
RETRY_S = 1.0


@dataclass(frozen=True)
class RunnerSettings:
    """The settings that a runner depends on."""

    path: str
    first_rollout: Callable[[], int]
    """Number of the rollout that the first call is for; asked when the weights are there."""
    open_source: Callable[[], QueueDataSource]
    """The queue as the function gets it, which leases under the gate's policy version; opened then, too."""


class GroupAttempts:
    """A `GroupMaker` as rollout functions use it: groups keep the stamps of their lease."""

    def __init__(self, groups: GroupMaker, failed: FailedGroups) -> None:
        self._groups, self.failed = groups, failed
        self.counts = ProducerCounts()

    @property
    def num_drifted_tokens(self) -> int:
        """See `OwnGenerate`."""
        return self._groups.num_drifted_tokens

    async def attempt(self, group: Group) -> Attempt:
        """Work on a group once."""
        outcome = await self._groups.make(group)
        samples = list(outcome.samples)
        inherit_stamps(samples, group)
        if isinstance(outcome, MadeGroup):
            self.failed.finished(samples[0].group_index or 0)
            return Attempt(samples)
        if not outcome.failures:
            self.counts.groups_aborted += 1
            return Attempt(samples, aborted=True)
        cause = most_telling(outcome.failures)
        gives_up = await self.failed.attempt_failed(_work_of(group), outcome.failures)
        if not gives_up:
            await asyncio.sleep(RETRY_S)
        return Attempt(samples, failure=cause.reason, gives_up=gives_up)

    async def set_aside(self, group: Group, error: Exception) -> None:
        """Write a letter of a finished group that something failed on."""
        await self.failed.record(_work_of(group), [Failure(group, error)])


class RolloutRunner:
    """Calls the function for one rollout after another, in a thread, and hands its groups to the trainer."""

    def __init__(
        self,
        settings: RunnerSettings,
        gate: RequestGate,
        attempts: GroupAttempts,
        collector: GroupCollector,
        hook_args: Any,
    ) -> None:
        """`collector` uses `attempts`, whose requests go through `gate`; it is closed at first: resume it to begin."""
        self._settings, self.gate = settings, gate
        self._source: QueueDataSource | None = None
        self._attempts, self._collector, self._hook_args = attempts, collector, hook_args
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Begin no rollout, and cut the one that runs short; `run` then returns."""
        self._stopping.set()
        self._collector.end()
        if self._source is not None:
            self._source.end()
        self.gate.open_to_end()

    def stats(self) -> ProducerStats:
        return self._attempts.counts.stats(
            self.gate,
            blocked_s=0.0,
            failed_samples=self._attempts.failed.num_samples_by_reason,
            drifted_tokens=self._attempts.num_drifted_tokens,
        )

    async def run(self) -> None:
        """Until stopped. Raises `RunFailedError` when the function raises or returns something else than groups."""
        await self.gate.opened()
        if self._stopping.is_set():
            return
        function = load_function(FLAG, self._settings.path)
        source = self._source = await asyncio.to_thread(self._settings.open_source)
        try:
            await self._rollouts(function, source, await asyncio.to_thread(self._settings.first_rollout))
        finally:
            await self._collector.close(source)
            await asyncio.to_thread(source.close)

    async def _rollouts(self, function: Callable[..., Any], source: QueueDataSource, rollout_id: int) -> None:
        call = RolloutCall(self._collector, asyncio.get_running_loop())
        while not self._stopping.is_set():
            output = await asyncio.to_thread(self._called, function, rollout_id, source, call)
            if not output.samples:
                await self._stopping.wait()
                return
            if output.metrics:
                logger.info("rollout %d: %s", rollout_id, dict(output.metrics))
            await self._accept(output, source)
            rollout_id += 1

    def _called(
        self, function: Callable[..., Any], rollout_id: int, source: QueueDataSource, call: RolloutCall
    ) -> RolloutFnTrainOutput:
        """One call of the function, in a thread of its own."""
        bind(call)
        try:
            output = function(self._hook_args, rollout_id, source, evaluation=False)
        except VimeError:
            raise
        except Exception as error:  # the boundary to user code
            raise self._failed(rollout_id, f"raised {type(error).__name__}: {error}") from error
        groups = output.samples if isinstance(output, RolloutFnTrainOutput) else output
        if not isinstance(groups, Sequence) or not all(_is_group(group) for group in groups):
            raise self._failed(
                rollout_id, f"returned a value of type {type(output).__name__}, allowed: lists of samples"
            )
        for ids in (ids for group in groups for item in group if len(ids := _rollout_ids(item)) > 1):
            raise self._failed(
                rollout_id, f"returned segments of one rollout with the ids {', '.join(ids)}, allowed: one for all"
            )
        return output if isinstance(output, RolloutFnTrainOutput) else RolloutFnTrainOutput(groups)

    def _failed(self, rollout_id: int, what: str) -> RunFailedError:
        return RunFailedError(
            f"{FLAG} {self._settings.path}, rollout {rollout_id}: it {what}.", next_step="Correct the function."
        )

    async def _accept(self, output: RolloutFnTrainOutput, source: QueueDataSource) -> None:
        """Hand the groups to the trainer, many in one transaction; one that can't be trained is set aside."""
        groups = list(map(flat_group, output.samples))
        for start in range(0, len(groups), MAX_GROUPS_PER_CALL):
            together = groups[start : start + MAX_GROUPS_PER_CALL]
            try:
                await self._accept_together(together, source)
            except FailedSampleError:  # nothing of them was accepted
                for group in together:
                    await self._accept_or_drop(group, source)
        if output.on_accepted is not None:
            await asyncio.to_thread(output.on_accepted)

    async def _accept_together(self, groups: Sequence[Group], source: QueueDataSource) -> None:
        positions = await asyncio.to_thread(source.accept_samples, groups)
        for group, position in zip(groups, positions, strict=True):
            self._attempts.counts.answered(group, accepted=position is not None)

    async def _accept_or_drop(self, group: Group, source: QueueDataSource) -> None:
        try:
            await self._accept_together([group], source)
        except FailedSampleError as error:
            await self._attempts.set_aside(group, error)
            await asyncio.to_thread(source.drop_samples, [group], error.reason)


def _is_group(group: Any) -> bool:
    return isinstance(group, Sequence) and bool(group) and all(isinstance(s, Sample) for s in flat_group(group))


def _rollout_ids(item: Any) -> list[str]:
    """Those that the segments of one rollout have, in order; segments without any get that of the first sample."""
    segments = list(item) if isinstance(item, Sequence) else []
    if segments and all(segment.rollout_id is None for segment in segments):
        for segment in segments:
            segment.rollout_id = segments[0].index
    return sorted({str(segment.rollout_id) for segment in segments})


def _work_of(group: Group) -> Work:
    """What a group was leased as, by the stamps of its samples. Raises `RunFailedError` where none has any."""
    for sample in group:
        if "_queue_work" in vars(sample):
            return cast(Work, vars(sample)["_queue_work"])
    raise RunFailedError(
        f"No sample of group {group[0].group_index} is from the data source.",
        next_step="Return the samples that get_samples gave out, or copies of them.",
    )
