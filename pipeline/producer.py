"""The rollout producer: leases groups, has them made, publishes them, and has them accepted. CPU only, asyncio."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Protocol

import msgspec

from pipeline.activity import ActivityBoard, Phase
from pipeline.failed_groups import FailedGroups, Failure, most_telling
from pipeline.group_maker import GroupMaker, MadeGroup, UnfinishedGroup
from pipeline.group_start import oldest_of, read_start
from pipeline.messages import AcceptReply, AcceptRequest, HeldLease, LeaseReply, LeaseStatus, ProducerStats, Work
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
FOLLOW_S = 0.5
"""How often a producer looks whether the coordinator is another one."""


class QueueClient(Protocol):
    """What a producer needs of the coordinator."""

    async def epoch(self) -> int: ...
    async def take_over(self, worker_id: str, held: list[HeldLease]) -> list[bytes | None]: ...

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


@dataclass(eq=False)
class _Held:
    """A group that is worked on."""

    work: Work
    """With its present lease, which changes when another coordinator takes over."""
    version: int
    """Policy version under which it was leased."""
    task: asyncio.Task[None] | None = None
    is_outgoing: bool = False
    """Whether it waits for room in the writer."""


@dataclass(frozen=True)
class _Outgoing:
    """A group on its way to the pool: made, or to be gone on with."""

    held: _Held
    lease: bytes
    """The one that it is published for."""
    outcome: MadeGroup | UnfinishedGroup
    group: EncodedGroup


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
        self._held: list[_Held] = []
        self._failed = failed_groups
        self._writer: GroupWriter[_Outgoing] = GroupWriter(pool, settings.worker_id, write_limits)
        self._num_putting = 0
        self._queue_is_full = False
        self._counts = ProducerCounts()
        self._blocked = Stopwatch()
        self._activity = activity or ActivityBoard()
        self._epoch: int | None = None
        self._taking_over = asyncio.Lock()

    def stop(self) -> None:
        """Lease no more, give unfinished groups back, publish the finished ones; `run` then returns."""
        self._stopping = True
        self._writer.close_input()
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
            await self._give_back_unfinished()
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
        return [self._lease_loop(), self._publish_loop(), self._heartbeat_loop(), self._follow_coordinator()]

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
                held = _Held(work, version)
                held.task = self._begin(self._produce(held))
                self._held.append(held)
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

    async def _produce(self, held: _Held) -> None:
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

    async def _group_made(self, held: _Held, made: MadeGroup) -> None:
        """Publish a group, or have it dropped where the filter rejects it."""
        try:
            judged = await self._filter.judge(made.samples)
        except SampleError as error:
            failures = [Failure(made.samples, error)]
            await self._group_failed(held, UnfinishedGroup(made.samples, failures, error.message))
            return
        self._failed.finished(held.work.group_index)
        if judged.keep:
            await self._put(held, made, made.group)
        else:
            await self._drop(held, rejection(judged))

    async def _put(self, held: _Held, outcome: MadeGroup | UnfinishedGroup, group: EncodedGroup) -> None:
        """Hand a group to the writer, which may make this wait; that counts as blocked."""
        held.is_outgoing = True
        self._num_putting += 1
        self._note_blocked()
        try:
            reach(KillPoint.BEFORE_PUBLISH)
            lease = held.work.lease
            with self._activity.doing(Phase.WRITING, held.work.group_index, []):
                await self._writer.put(group, lease, _Outgoing(held, lease, outcome, group))
        finally:
            self._num_putting -= 1
            self._note_blocked()

    async def _give_back(self, held: _Held, unfinished: UnfinishedGroup) -> None:
        """Have the queue hand out the group again, with what it has; without it where that can't be stored."""
        if not unfinished.has_responses:
            await self._release(held, unfinished.reason)
            return
        try:
            encoded = await asyncio.to_thread(self._groups.encode, unfinished.samples)
        except SampleError as error:
            logger.warning("group %d is generated anew: %s", held.work.group_index, error)
            await self._release(held, unfinished.reason)
            return
        await self._put(held, unfinished, encoded)

    def _note_blocked(self) -> None:
        self._blocked.set(self._queue_is_full or self._num_putting > 0)

    async def _group_failed(self, held: _Held, unfinished: UnfinishedGroup) -> None:
        """Try the group again or drop it for good."""
        if await self._failed.attempt_failed(held.work, unfinished.failures):
            await self._drop(held, most_telling(unfinished.failures).reason)
        else:
            await asyncio.sleep(RETRY_S)
            await self._give_back(held, unfinished)

    async def _drop(self, held: _Held, reason: str) -> None:
        await self._queue.drop(held.work.group_index, held.work.lease, reason)
        self._let_go(held)

    async def _release(self, held: _Held, reason: str) -> None:
        await self._queue.release(held.work.group_index, held.work.lease, reason)
        self._let_go(held)

    def _let_go(self, held: _Held) -> None:
        if held in self._held:
            self._held.remove(held)

    async def _publish_loop(self) -> None:
        """Have accepted, or taken back, what became durable: all of one transaction together."""
        async for batch in self._writer.batches():
            reach(KillPoint.AFTER_PUBLISH)
            made = [(item, item.outcome, ref) for item, ref in batch if isinstance(item.outcome, MadeGroup)]
            refused: list[_Outgoing] = []
            if made:
                replies = await self._queue.accept(
                    [AcceptRequest(item.lease, ref, outcome.summary) for item, outcome, ref in made]
                )
                refused += [item for (item, _, _), reply in zip(made, replies, strict=True) if reply.position is None]
                for (_, outcome, _), reply in zip(made, replies, strict=True):
                    if reply.position is not None:
                        self._counts.answered(outcome.samples, accepted=True)
            returns = [
                (item, GroupReturn(item.lease, ref, Stage.PARTIAL, oldest_of(item.outcome.samples)))
                for item, ref in batch
                if isinstance(item.outcome, UnfinishedGroup)
            ]
            if returns:
                done = await self._queue.yield_groups([group for _, group in returns])
                refused += [item for (item, _), went_back in zip(returns, done, strict=True) if not went_back]
            await self._after_refusals(refused)
            again = {id(item.held) for item in refused if item.held.work.lease != item.lease}
            for item, _ in batch:
                if id(item.held) not in again:
                    self._let_go(item.held)

    async def _after_refusals(self, refused: list[_Outgoing]) -> None:
        """Publish again what was refused only because its lease is of another coordinator; the rest is stale."""
        if refused:
            await self._notice_coordinator()
        for item in refused:
            if item.held.work.lease != item.lease:
                self._begin(self._put(item.held, item.outcome, item.group))
            elif isinstance(item.outcome, MadeGroup):
                self._counts.answered(item.outcome.samples, accepted=False)

    async def _all_accepted(self) -> None:
        """Until every finished group is with the queue."""
        while True:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._writer.join()
            self._reap()
            if not self._tasks:
                return

    async def _follow_coordinator(self) -> None:
        """Go on under another coordinator when the one before has died."""
        while True:
            await self._notice_coordinator()
            await asyncio.sleep(FOLLOW_S)

    async def _notice_coordinator(self) -> None:
        """Have leases that another coordinator gave out replaced by leases of the present one."""
        epoch = await self._queue.epoch()
        async with self._taking_over:
            if epoch == self._epoch:
                return
            if self._epoch is not None and self._held:
                held = list(self._held)
                asked = [HeldLease(item.work.lease, item.version) for item in held]
                taken = await self._queue.take_over(self._settings.worker_id, asked)
                for item, lease in zip(held, taken, strict=True):
                    if lease is not None:
                        item.work = msgspec.structs.replace(item.work, lease=lease)
            self._epoch = epoch

    async def _heartbeat_loop(self) -> None:
        while True:
            await asyncio.sleep(max(0.1, self._settings.lease_seconds / 3))
            await self._notice_coordinator()
            held = [(item, item.work.lease) for item in self._held]
            states = await self._queue.heartbeat([lease for _, lease in held])
            for alive, (item, lease) in zip(states, held, strict=True):
                if not alive and item in self._held and item.work.lease == lease:
                    await self._lost(item)

    async def _lost(self, held: _Held) -> None:
        """The group belongs to somebody else now; a result of ours would be refused."""
        await self._notice_coordinator()
        if held in self._held and held.task is not None:
            self._let_go(held)
            held.task.cancel()

    async def _give_back_unfinished(self) -> None:
        unfinished = [
            held for held in self._held if held.task is not None and not held.task.done() and not held.is_outgoing
        ]
        for held in unfinished:
            if held.task is not None:
                held.task.cancel()
        await asyncio.gather(*(held.task for held in unfinished if held.task is not None), return_exceptions=True)
        for held in unfinished:
            if held in self._held:
                await self._release(held, "producer stopped")
