"""The rollout producer: leases groups, has them made, publishes them, and has them accepted. CPU only, asyncio."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from pipeline.failed_groups import FailedGroups, Failure, most_telling
from pipeline.group_maker import GroupMaker, MadeGroup, UnfinishedGroup
from pipeline.group_start import oldest_of, read_start
from pipeline.messages import AcceptReply, AcceptRequest, LeaseReply, LeaseStatus, ProducerStats, Work
from pipeline.producer_counts import ProducerCounts
from pipeline.request_gate import RequestGate
from pipeline.stopwatch import Stopwatch
from storage.columns import EncodedGroup
from storage.contracts import PayloadPool
from storage.queue_types import GroupReturn, Stage
from storage.writer import GroupWriter, WriteLimits
from vime.errors import SampleError
from vime.rollout.dynamic_filter import DynamicFilter, rejection
from vime.utils.kill_points import KillPoint, reach

logger = logging.getLogger(__name__)

POLL_S = 0.05
RETRY_S = 1.0


class QueueClient(Protocol):
    """What a producer needs of the coordinator."""

    async def lease(self, worker_id: str, max_groups: int, policy_version: int) -> LeaseReply: ...
    async def heartbeat(self, leases: list[bytes]) -> list[bool]: ...
    async def accept(self, requests: list[AcceptRequest]) -> list[AcceptReply]: ...
    async def release(self, group_index: int, lease: bytes, reason: str) -> None: ...
    async def yield_groups(self, returns: list[GroupReturn]) -> list[bool]: ...
    async def drop(self, group_index: int, lease: bytes, reason: str) -> None: ...


@dataclass(frozen=True)
class ProducerSettings:
    """The settings that a producer depends on."""

    worker_id: str
    n_samples_per_prompt: int
    max_groups_in_flight: int
    lease_seconds: float


@dataclass(frozen=True)
class _Outgoing:
    """A group on its way to the pool: made, or to be gone on with."""

    work: Work
    outcome: MadeGroup | UnfinishedGroup


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
    ) -> None:
        """`groups` sends its requests through `gate`, which is closed at first: resume it to begin."""
        self._settings, self._queue, self._pool = settings, queue, pool
        self.gate, self._groups, self._filter = gate, groups, dynamic_filter
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._held: dict[bytes, tuple[Work, asyncio.Task[None]]] = {}
        self._failed = failed_groups
        self._writer: GroupWriter[_Outgoing] = GroupWriter(pool, settings.worker_id, write_limits)
        self._num_putting = 0
        self._generated: set[bytes] = set()
        self._queue_is_full = False
        self._counts = ProducerCounts()
        self._blocked = Stopwatch()

    def stop(self) -> None:
        """Lease no more, give unfinished groups back, publish the finished ones; `run` then returns."""
        self._stopping = True
        self._writer.close_input()
        self.gate.open_to_end()

    def stats(self) -> ProducerStats:
        return self._counts.stats(
            self.gate,
            blocked_s=self._blocked.total_s(),
            failed_samples=self._failed.num_samples_by_reason,
            drifted_tokens=self._groups.num_drifted_tokens,
        )

    async def run(self) -> None:
        """Produce until stopped. An exception here is a fault of the producer, not of one sample."""
        loops = [asyncio.create_task(loop()) for loop in (self._lease_loop, self._publish_loop, self._heartbeat_loop)]
        try:
            done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            for loop in done:
                loop.result()
            await self._give_back_unfinished()
            loops.append(asyncio.create_task(self._all_accepted()))
            done, _ = await asyncio.wait(loops[1:], return_when=asyncio.FIRST_COMPLETED)
            for loop in done:
                loop.result()
        finally:
            for task in [*loops, *self._tasks]:
                task.cancel()
            await asyncio.gather(*loops, *self._tasks, return_exceptions=True)

    async def _lease_loop(self) -> None:
        while not self._stopping:
            self._reap()
            await self.gate.opened()
            room = self._settings.max_groups_in_flight - len(self._tasks)
            if room <= 0:
                await asyncio.wait(self._tasks, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                continue
            reply = await self._queue.lease(self._settings.worker_id, room, self.gate.policy_version)
            self._queue_is_full = reply.status is not LeaseStatus.WORK
            self._note_blocked()
            for work in reply.work:
                task = asyncio.create_task(self._produce(work))
                self._tasks.add(task)
                self._held[work.lease] = (work, task)
            if not reply.work:
                await asyncio.sleep(POLL_S)

    def _reap(self) -> None:
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.remove(task)
            if not task.cancelled():
                task.result()

    async def _produce(self, work: Work) -> None:
        """One group, from lease to outbox. A failed group goes back to the queue, or is set aside at last."""
        start = await asyncio.to_thread(read_start, work, self._pool, self._settings.n_samples_per_prompt)
        outcome = await self._groups.make(start)
        if isinstance(outcome, MadeGroup):
            await self._group_made(work, outcome)
        elif outcome.failures:
            await self._group_failed(work, outcome)
        else:
            self._counts.groups_aborted += 1
            await self._give_back(work, outcome)

    async def _group_made(self, work: Work, made: MadeGroup) -> None:
        """Publish a group, or have it dropped where the filter rejects it."""
        try:
            judged = await self._filter.judge(made.samples)
        except SampleError as error:
            failures = [Failure(made.samples, error)]
            await self._group_failed(work, UnfinishedGroup(made.samples, failures, error.message))
            return
        self._failed.finished(work.group_index)
        if judged.keep:
            await self._put(_Outgoing(work, made), made.group)
        else:
            await self._queue.drop(work.group_index, work.lease, rejection(judged))
            self._held.pop(work.lease, None)

    async def _put(self, outgoing: _Outgoing, group: EncodedGroup) -> None:
        """Hand a group to the writer, which may make this wait; that counts as blocked."""
        self._generated.add(outgoing.work.lease)
        self._num_putting += 1
        self._note_blocked()
        try:
            reach(KillPoint.BEFORE_PUBLISH)
            await self._writer.put(group, outgoing.work.lease, outgoing)
        finally:
            self._num_putting -= 1
            self._note_blocked()
            self._generated.discard(outgoing.work.lease)

    async def _give_back(self, work: Work, unfinished: UnfinishedGroup) -> None:
        """Have the queue hand out the group again, with what it has; without it where that can't be stored."""
        if not unfinished.has_responses:
            await self._release(work, unfinished.reason)
            return
        try:
            encoded = await asyncio.to_thread(self._groups.encode, unfinished.samples)
        except SampleError as error:
            logger.warning("group %d is generated anew: %s", work.group_index, error)
            await self._release(work, unfinished.reason)
            return
        await self._put(_Outgoing(work, unfinished), encoded)

    def _note_blocked(self) -> None:
        self._blocked.set(self._queue_is_full or self._num_putting > 0)

    async def _group_failed(self, work: Work, unfinished: UnfinishedGroup) -> None:
        """Try the group again or drop it for good."""
        if await self._failed.attempt_failed(work, unfinished.failures):
            await self._queue.drop(work.group_index, work.lease, most_telling(unfinished.failures).reason)
            self._held.pop(work.lease, None)
        else:
            await asyncio.sleep(RETRY_S)
            await self._give_back(work, unfinished)

    async def _release(self, work: Work, reason: str) -> None:
        await self._queue.release(work.group_index, work.lease, reason)
        self._held.pop(work.lease, None)

    async def _publish_loop(self) -> None:
        """Have accepted, or taken back, what became durable: all of one transaction together."""
        async for batch in self._writer.batches():
            reach(KillPoint.AFTER_PUBLISH)
            made = [(item.work, item.outcome, ref) for item, ref in batch if isinstance(item.outcome, MadeGroup)]
            if made:
                replies = await self._queue.accept(
                    [AcceptRequest(work.lease, ref, group.summary) for work, group, ref in made]
                )
                for (_, group, _), reply in zip(made, replies, strict=True):
                    self._counts.answered(group.samples, accepted=reply.position is not None)
            returns = [
                GroupReturn(item.work.lease, ref, Stage.PARTIAL, oldest_of(item.outcome.samples))
                for item, ref in batch
                if isinstance(item.outcome, UnfinishedGroup)
            ]
            if returns:
                await self._queue.yield_groups(returns)
            for item, _ in batch:
                self._held.pop(item.work.lease, None)

    async def _all_accepted(self) -> None:
        """Until every finished group is with the queue."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._writer.join()

    async def _heartbeat_loop(self) -> None:
        while True:
            await asyncio.sleep(max(0.1, self._settings.lease_seconds / 3))
            held = list(self._held)
            for alive, lease in zip(await self._queue.heartbeat(held), held, strict=True):
                if not alive and lease in self._held:
                    # The group belongs to somebody else now; a result of ours would be refused.
                    self._held.pop(lease)[1].cancel()

    async def _give_back_unfinished(self) -> None:
        unfinished = [
            (work, task) for work, task in self._held.values() if not task.done() and work.lease not in self._generated
        ]
        for _, task in unfinished:
            task.cancel()
        await asyncio.gather(*(task for _, task in unfinished), return_exceptions=True)
        for work, _ in unfinished:
            if work.lease in self._held:
                await self._release(work, "producer stopped")
