"""From finished groups to common transactions: batched by time and bytes, and bounded, so that a producer waits."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from storage.columns import EncodedGroup
from storage.pool_writers import MAX_AT_ONCE
from storage.refs import GroupRef
from vime.errors import DiskFullError

logger = logging.getLogger(__name__)

_Context = TypeVar("_Context")


class GroupPublisher(Protocol):
    """The part of a pool that a writer needs."""

    def publish_groups(self, items: Sequence[tuple[EncodedGroup, bytes]], *, submission_id: str) -> list[GroupRef]: ...


@dataclass(frozen=True)
class WriteLimits:
    """How groups are brought together, and how many may wait."""

    max_delay_s: float = 0.02
    """How long the first group of a transaction waits for others."""
    batch_bytes: int = 64 << 20
    """Most payload of one transaction; a larger group is one of its own."""
    batch_groups: int = 64
    """Most groups of one transaction; of more, the index that each reader parses grows long."""
    overlap_bytes: int = 1 << 20
    """Least payload for which a second transaction begins beside one that runs; less waits until that has ended."""
    waiting_bytes: int = 256 << 20
    """Most payload that waits or is being written; a larger group is let in when nothing else is there."""
    waiting_groups: int = 256
    full_disk_wait_s: float = 600.0
    """How long a full disk is waited for."""
    full_disk_retry_s: float = 5.0


@dataclass(frozen=True)
class _Waiting(Generic[_Context]):
    group: EncodedGroup
    lease: bytes
    context: _Context
    num_bytes: int
    since: float


@dataclass(frozen=True)
class _Transaction(Generic[_Context]):
    batch: list[_Waiting[_Context]]
    publishing: asyncio.Task[list[GroupRef]]


class GroupWriter(Generic[_Context]):
    """Groups in, durable groups out, in order. For one event loop.

    Where much waits, two transactions run at once, so that one is hashed while the other is synced. Nothing is
    dropped: a producer that puts more than fits waits in `put`.
    """

    def __init__(self, pool: GroupPublisher, name: str, limits: WriteLimits | None = None) -> None:
        self._pool, self._name, self._limits = pool, name, limits or WriteLimits()
        self._waiting: deque[_Waiting[_Context]] = deque()
        self._changed = asyncio.Condition()
        self._turn = asyncio.Lock()
        self._num_groups = 0
        self._num_bytes = 0
        self._num_unfinished = 0
        self._closing = False

    @property
    def num_bytes(self) -> int:
        """Payload that waits or is being written."""
        return self._num_bytes

    @property
    def num_groups(self) -> int:
        """Groups that wait or are being written."""
        return self._num_groups

    async def put(self, group: EncodedGroup, lease: bytes, context: _Context) -> None:
        """Hand a group over, in turn, as soon as there is room; `context` comes back with its reference."""
        num_bytes = len(group.header) + sum(array.nbytes for array in group.columns.values())
        async with self._turn, self._changed:
            await self._changed.wait_for(lambda: self._has_room(num_bytes))
            now = asyncio.get_running_loop().time()
            self._waiting.append(_Waiting(group, lease, context, num_bytes, now))
            self._num_groups += 1
            self._num_bytes += num_bytes
            self._num_unfinished += 1
            self._changed.notify_all()

    async def batches(self) -> AsyncIterator[list[tuple[_Context, GroupRef]]]:
        """What became durable together, for ever. Transactions begin when the next batch is asked for.

        A full disk is waited for; raises `DiskFullError` when that took too long or `close_input` was called, and
        `StorageError`. What was published beside a transaction that failed does not come out.
        """
        running: deque[_Transaction[_Context]] = deque()
        try:
            while True:
                await self._begin_until_first_ends(running)
                first = running.popleft()
                refs = first.publishing.result()
                await self._free(first.batch)
                yield [(item.context, ref) for item, ref in zip(first.batch, refs, strict=True)]
                async with self._changed:
                    self._num_unfinished -= len(first.batch)
                    self._changed.notify_all()
        finally:
            for transaction in running:
                _abandon(transaction.publishing)

    def close_input(self) -> None:
        """No new work comes: a full disk is no longer waited for."""
        self._closing = True

    async def join(self) -> None:
        """Until all groups that were put have come out of `batches` and the consumer asked for more."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_unfinished == 0)

    def _has_room(self, num_bytes: int) -> bool:
        limits = self._limits
        fits = self._num_bytes + num_bytes <= limits.waiting_bytes and self._num_groups < limits.waiting_groups
        return fits or self._num_groups == 0

    async def _begin_until_first_ends(self, running: deque[_Transaction[_Context]]) -> None:
        """Begin transactions, one at least, until the oldest has ended."""
        while not running or not running[0].publishing.done():
            if len(running) == MAX_AT_ONCE:
                await asyncio.wait([running[0].publishing])
                return
            ready = asyncio.create_task(self._wait_for_batch(is_first=not running))
            try:
                oldest = [transaction.publishing for transaction in itertools.islice(running, 1)]
                await asyncio.wait([ready, *oldest], return_when=asyncio.FIRST_COMPLETED)
            finally:
                _abandon(ready)
            if ready.done() and not ready.cancelled():
                batch = [self._waiting.popleft() for _ in range(self._batch_length(MAX_AT_ONCE - len(running)))]
                running.append(_Transaction(batch, asyncio.create_task(self._publish(batch))))

    async def _wait_for_batch(self, *, is_first: bool) -> None:
        """Until the next transaction can begin; `is_first` when none runs."""
        async with self._changed:
            if not is_first:
                await self._changed.wait_for(lambda: self._num_waiting_bytes() >= self._limits.overlap_bytes)
                return
            await self._changed.wait_for(lambda: bool(self._waiting))
            deadline = self._waiting[0].since + self._limits.max_delay_s
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait_for(self._is_full)
            except TimeoutError:
                pass

    def _num_waiting_bytes(self) -> int:
        return sum(item.num_bytes for item in self._waiting)

    def _is_full(self) -> bool:
        """Whether waiting longer adds nothing to the next transaction."""
        taken = list(itertools.islice(self._waiting, self._batch_length(1)))
        full = sum(item.num_bytes for item in taken) >= self._limits.batch_bytes
        return full or len(taken) >= self._limits.batch_groups or len(taken) < len(self._waiting)

    def _batch_length(self, num_idle: int) -> int:
        """How many of the first waiting groups one transaction takes, when `num_idle` can share what waits."""
        waiting_bytes = self._num_waiting_bytes()
        shared = waiting_bytes >= num_idle * self._limits.overlap_bytes
        most_bytes = min(self._limits.batch_bytes, waiting_bytes // num_idle if shared else waiting_bytes)
        num_bytes = 0
        for number, item in enumerate(self._waiting):
            num_bytes += item.num_bytes
            if number and (number >= self._limits.batch_groups or num_bytes > most_bytes):
                return number
        return len(self._waiting)

    async def _publish(self, batch: Sequence[_Waiting[_Context]]) -> list[GroupRef]:
        items = [(item.group, item.lease) for item in batch]
        submission_id = f"{self._name}:{uuid.uuid4().hex}"
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.full_disk_wait_s
        while True:
            try:
                return await asyncio.to_thread(self._pool.publish_groups, items, submission_id=submission_id)
            except DiskFullError as error:
                if self._closing or loop.time() >= deadline:
                    raise
                logger.warning("%d groups wait for space: %s", self._num_groups, error)
            await asyncio.sleep(self._limits.full_disk_retry_s)

    async def _free(self, batch: Sequence[_Waiting[_Context]]) -> None:
        async with self._changed:
            self._num_groups -= len(batch)
            self._num_bytes -= sum(item.num_bytes for item in batch)
            self._changed.notify_all()


def _abandon(task: asyncio.Task[Any]) -> None:
    """Let go of a task, its error included; what runs in a thread goes on to its end."""
    if not task.done():
        task.cancel()
    elif not task.cancelled():
        task.exception()
