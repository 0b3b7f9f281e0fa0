"""The rollout producer: leases groups, has them made, publishes them, and has them accepted. CPU only, asyncio."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass

import msgspec

from pipeline.activity import ActivityBoard, Phase
from pipeline.failed_groups import FailedGroups, Failure, most_telling
from pipeline.group_maker import GroupMaker, MadeGroup, UnfinishedGroup
from pipeline.group_outbox import GroupOutbox
from pipeline.group_start import read_start
from pipeline.held_groups import HeldGroup, HeldGroups
from pipeline.messages import LeaseStatus, ProducerStats
from pipeline.producer_counts import ProducerCounts
from pipeline.queue_client import QueueClient
from pipeline.request_gate import RequestGate
from pipeline.stopwatch import Stopwatch
from storage.contracts import PayloadPool
from storage.writer import WriteLimits
from vime.errors import SampleError
from vime.rollout.dynamic_filter import DynamicFilter, rejection

logger = logging.getLogger(__name__)

POLL_S = 0.05
RETRY_S = 1.0


@dataclass(frozen=True)
class ProducerSettings:
    """The settings that a producer depends on."""

    worker_id: str
    n_samples_per_prompt: int
    max_groups_in_flight: int
    lease_seconds: float


class Producer:
    """Runs until the queue wants no more groups or `stop` is called."""

    def __init__(
        self,
        settings: ProducerSettings,
        queue: QueueClient,
        pool: PayloadPool,
        gate: RequestGate,
        groups: GroupMaker,
        failed_groups: FailedGroups,
        dynamic_filter: DynamicFilter,
        write_limits: WriteLimits | None = None,
        activity: ActivityBoard | None = None,
    ) -> None:
        """`groups` sends its requests through `gate`, which is closed at first: resume it to begin. Both
        and this note on `activity` what the groups are at.
        """
        self._settings, self._queue, self._pool = settings, queue, pool
        self.gate, self._groups, self._filter = gate, groups, dynamic_filter
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._held = HeldGroups(queue, settings.worker_id, settings.lease_seconds)
        self._failed = failed_groups
        self._queue_is_full = False
        self._counts = ProducerCounts()
        self._blocked = Stopwatch()
        self._activity = activity or ActivityBoard()
        self._outbox = GroupOutbox(
            queue,
            pool,
            settings.worker_id,
            self._held,
            self._counts,
            self._activity,
            self._begin,
            self._note_blocked,
            write_limits,
        )

    def stop(self) -> None:
        """Lease no more, give unfinished groups back, publish the finished ones; `run` then returns."""
        self._stopping = True
        self._outbox.close_input()
        self.gate.open_to_end()

    def stats(self) -> ProducerStats:
        stats = self._counts.stats(
            self.gate,
            blocked_s=self._blocked.total_s(),
            failed_samples=self._failed.num_samples_by_reason,
            drifted_tokens=self._groups.num_drifted_tokens,
        )
        seconds = self._activity.seconds
        return msgspec.structs.replace(stats, reward_s=seconds(Phase.REWARD), generating_s=seconds(Phase.GENERATING))

    async def run(self) -> None:
        """Produce until stopped. An exception here is a fault of the producer, not of one sample."""
        loops = [asyncio.create_task(loop) for loop in self._loops()]
        try:
            done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            for loop in done:
                loop.result()
            await self._held.release_unfinished("producer stopped")
            loops.append(asyncio.create_task(self._all_accepted()))
            done, _ = await asyncio.wait(loops[1:], return_when=asyncio.FIRST_COMPLETED)
            for loop in done:
                loop.result()
        finally:
            for task in [*loops, *self._tasks]:
                task.cancel()
            await asyncio.gather(*loops, *self._tasks, return_exceptions=True)

    def _loops(self) -> list[Coroutine[object, object, None]]:
        """What goes on while it runs; that of the leases comes first, and alone ends by itself."""
        return [self._lease_loop(), self._outbox.run(), self._held.keep_leases(), self._held.follow_coordinator()]

    async def _lease_loop(self) -> None:
        while not self._stopping:
            self._reap()
            await self.gate.opened()
            room = self._settings.max_groups_in_flight - len(self._tasks)
            if room <= 0:
                await asyncio.wait(self._tasks, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                continue
            version = self.gate.policy_version
            reply = await self._queue.lease(self._settings.worker_id, room, version)
            self._queue_is_full = reply.status is not LeaseStatus.WORK
            self._note_blocked()
            for work in reply.work:
                held = HeldGroup(work, version)
                held.task = self._begin(self._produce(held))
                self._held.add(held)
            if not reply.work:
                await asyncio.sleep(POLL_S)

    def _begin(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Work on a group; what it raises ends the producer."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        return task

    def _reap(self) -> None:
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.remove(task)
            if not task.cancelled():
                task.result()

    async def _produce(self, held: HeldGroup) -> None:
        """One group, from lease to outbox. A failed group goes back to the queue, or is set aside at last."""
        start = await asyncio.to_thread(read_start, held.work, self._pool, self._settings.n_samples_per_prompt)
        try:
            outcome = await self._groups.make(start)
        finally:
            self._activity.ended(held.work.group_index)
        if isinstance(outcome, MadeGroup):
            await self._group_made(held, outcome)
        elif outcome.failures:
            await self._group_failed(held, outcome)
        else:
            self._counts.groups_aborted += 1
            await self._give_back(held, outcome)

    async def _group_made(self, held: HeldGroup, made: MadeGroup) -> None:
        """Publish a group, or have it dropped where the filter rejects it."""
        try:
            judged = await self._filter.judge(made.samples)
        except SampleError as error:
            failures = [Failure(made.samples, error)]
            await self._group_failed(held, UnfinishedGroup(made.samples, failures, error.message))
            return
        self._failed.finished(held.work.group_index)
        if judged.keep:
            await self._outbox.put(held, made, made.group)
        else:
            await self._held.drop(held, rejection(judged))

    async def _give_back(self, held: HeldGroup, unfinished: UnfinishedGroup) -> None:
        """Have the queue hand out the group again, with what it has; without it where that can't be stored."""
        if not unfinished.has_responses:
            await self._held.release(held, unfinished.reason)
            return
        try:
            encoded = await asyncio.to_thread(self._groups.encode, unfinished.samples)
        except SampleError as error:
            logger.warning("group %d is generated anew: %s", held.work.group_index, error)
            await self._held.release(held, unfinished.reason)
            return
        await self._outbox.put(held, unfinished, encoded)

    def _note_blocked(self) -> None:
        self._blocked.set(self._queue_is_full or self._outbox.is_full)

    async def _group_failed(self, held: HeldGroup, unfinished: UnfinishedGroup) -> None:
        """Try the group again or drop it for good."""
        if await self._failed.attempt_failed(held.work, unfinished.failures):
            await self._held.drop(held, most_telling(unfinished.failures).reason)
        else:
            await asyncio.sleep(RETRY_S)
            await self._give_back(held, unfinished)

    async def _all_accepted(self) -> None:
        """Until every finished group is with the queue."""
        while True:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._outbox.join()
            self._reap()
            if not self._tasks:
                return
