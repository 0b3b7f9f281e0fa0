"""The groups that a producer works on, each under a lease of the coordinator that there is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from pipeline.messages import HeldLease, Work
from pipeline.queue_client import QueueClient

FOLLOW_S = 0.5
"""How often it is asked whether the coordinator is another one."""


@dataclass(eq=False)
class HeldGroup:
    """A group that is worked on."""

    work: Work
    """With its present lease, which changes when another coordinator takes over."""
    version: int
    """Policy version under which it was leased."""
    task: asyncio.Task[None] | None = None
    is_outgoing: bool = False
    """Whether it waits for room in the writer."""


class HeldGroups:
    """Leases are extended, and exchanged when another coordinator takes over; work on a group that is lost ends."""

    def __init__(self, queue: QueueClient, worker_id: str, lease_seconds: float) -> None:
        self._queue, self._worker_id, self._lease_seconds = queue, worker_id, lease_seconds
        self._groups: list[HeldGroup] = []
        self.epoch: int | None = None
        """Of the coordinator that has given out the leases; None before it is known."""
        self._taking_over = asyncio.Lock()

    def __iter__(self) -> Iterator[HeldGroup]:
        return iter(self._groups)

    def add(self, held: HeldGroup) -> None:
        """A group that was leased."""
        self._groups.append(held)

    def let_go(self, held: HeldGroup) -> None:
        """The group needs no lease any more."""
        if held in self._groups:
            self._groups.remove(held)

    async def drop(self, held: HeldGroup, reason: str) -> None:
        """Have the queue set a group aside for good."""
        await self._queue.drop(held.work.group_index, held.work.lease, reason)
        self.let_go(held)

    async def release(self, held: HeldGroup, reason: str) -> None:
        """Have the queue hand a group out again, without what was made of it."""
        await self._queue.release(held.work.group_index, held.work.lease, reason)
        self.let_go(held)

    async def release_unfinished(self, reason: str) -> None:
        """End the work on groups that are not made yet, and have the queue hand them out again."""
        unfinished = [
            held for held in self._groups if held.task is not None and not held.task.done() and not held.is_outgoing
        ]
        for held in unfinished:
            if held.task is not None:
                held.task.cancel()
        await asyncio.gather(*(held.task for held in unfinished if held.task is not None), return_exceptions=True)
        for held in unfinished:
            if held in self._groups:
                await self.release(held, reason)

    async def keep_leases(self) -> None:
        """Extend the leases at intervals, until cancelled."""
        while True:
            await asyncio.sleep(max(0.1, self._lease_seconds / 3))
            await self.notice_coordinator()
            held = [(item, item.work.lease) for item in self._groups]
            states = await self._queue.heartbeat([lease for _, lease in held])
            for alive, (item, lease) in zip(states, held, strict=True):
                if not alive and item in self._groups and item.work.lease == lease:
                    await self._lost(item)

    async def follow_coordinator(self) -> None:
        """Go on under another coordinator when the one before has died; until cancelled."""
        while True:
            await self.notice_coordinator()
            await asyncio.sleep(FOLLOW_S)

    async def notice_coordinator(self) -> None:
        """Have leases that another coordinator gave out replaced by leases of the present one."""
        epoch = await self._queue.epoch()
        async with self._taking_over:
            if epoch == self.epoch:
                return
            if self.epoch is not None and self._groups:
                held = list(self._groups)
                asked = [HeldLease(item.work.lease, item.version) for item in held]
                taken = await self._queue.take_over(self._worker_id, asked)
                for item, lease in zip(held, taken, strict=True):
                    if lease is not None:
                        item.work = msgspec.structs.replace(item.work, lease=lease)
            self.epoch = epoch

    async def _lost(self, held: HeldGroup) -> None:
        """The group belongs to somebody else now; a result of ours would be refused."""
        await self.notice_coordinator()
        if held in self._groups and held.task is not None:
            self.let_go(held)
            held.task.cancel()
