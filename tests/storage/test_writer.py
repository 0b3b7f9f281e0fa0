"""Groups share transactions, wait when there is no room, and none is dropped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from storage.columns import EncodedGroup
from storage.refs import GroupRef, PoolRef
from storage.writer import GroupWriter, WriteLimits
from vime.errors import DiskFullError, StorageError

LIMITS = WriteLimits(max_delay_s=0.01, full_disk_retry_s=0.001)


def group(num_bytes: int) -> EncodedGroup:
    return EncodedGroup(b"", {"x": np.zeros(num_bytes, np.uint8)})


class Disk:
    """Publishes one transaction after the other; `held` stops it, `errors` are raised first."""

    def __init__(self) -> None:
        self.transactions: list[list[bytes]] = []
        self.submission_ids: list[str] = []
        self.errors: list[StorageError] = []
        self.free = threading.Event()
        self.free.set()
        self.at_once = 0

    def publish_groups(self, items: Sequence[tuple[EncodedGroup, bytes]], *, submission_id: str) -> list[GroupRef]:
        self.at_once += 1
        assert self.at_once == 1
        assert self.free.wait(20)
        self.at_once -= 1
        self.submission_ids.append(submission_id)
        if self.errors:
            raise self.errors.pop(0)
        self.transactions.append([lease for _, lease in items])
        return [replace_digest(lease) for _, lease in items]


def replace_digest(lease: bytes) -> PoolRef:
    return PoolRef("r", "p", "s", 1, "c", 1, "sha256", 0, 0, lease.decode(), 4, 100)


class Consumer:
    """Takes what became durable."""

    def __init__(self, writer: GroupWriter[int]) -> None:
        self.found: list[tuple[int, str]] = []
        self.task = asyncio.create_task(self._take(writer))

    async def _take(self, writer: GroupWriter[int]) -> None:
        async for batch in writer.batches():
            self.found += [(context, ref.digest) for context, ref in batch]


@asynccontextmanager
async def consuming(writer: GroupWriter[int]) -> AsyncIterator[Consumer]:
    consumer = Consumer(writer)
    try:
        yield consumer
    finally:
        consumer.task.cancel()
        await asyncio.gather(consumer.task, return_exceptions=True)


async def put(writer: GroupWriter[int], number: int, num_bytes: int = 10) -> None:
    await writer.put(group(num_bytes), b"%d" % number, number)


async def reached(condition: Callable[[], bool]) -> None:
    """Until it is so."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


async def blocked(*tasks: asyncio.Task[None]) -> bool:
    """Whether all tasks still wait when everything else that can run has run."""
    for _ in range(50):
        await asyncio.sleep(0)
    return not any(task.done() for task in tasks)


async def test_groups_that_come_together_share_a_transaction_in_their_order() -> None:
    disk = Disk()
    writer: GroupWriter[int] = GroupWriter(disk, "w", LIMITS)
    for number in range(5):
        await put(writer, number)
    async with consuming(writer) as consumer:
        await writer.join()
    assert disk.transactions == [[b"0", b"1", b"2", b"3", b"4"]]
    assert consumer.found == [(number, str(number)) for number in range(5)]
    assert (writer.num_groups, writer.num_bytes) == (0, 0)


@pytest.mark.parametrize(
    "limits", [replace(LIMITS, batch_bytes=25), replace(LIMITS, batch_groups=2)], ids=["bytes", "groups"]
)
async def test_a_transaction_takes_no_more_than_its_limit(limits: WriteLimits) -> None:
    disk = Disk()
    writer: GroupWriter[int] = GroupWriter(disk, "w", limits)
    for number in range(5):
        await put(writer, number)
    async with consuming(writer):
        await writer.join()
    assert disk.transactions == [[b"0", b"1"], [b"2", b"3"], [b"4"]]
    assert len(set(disk.submission_ids)) == 3


async def test_a_full_transaction_does_not_wait_for_the_delay() -> None:
    disk = Disk()
    writer: GroupWriter[int] = GroupWriter(disk, "w", replace(LIMITS, max_delay_s=1000.0, batch_groups=2))
    async with consuming(writer) as consumer:
        await put(writer, 0)
        await put(writer, 1)
        await put(writer, 2)
        await reached(lambda: len(consumer.found) == 2)
    assert disk.transactions == [[b"0", b"1"]]


async def test_a_group_larger_than_a_transaction_goes_alone() -> None:
    disk = Disk()
    writer: GroupWriter[int] = GroupWriter(disk, "w", replace(LIMITS, batch_bytes=15, waiting_bytes=40))
    async with consuming(writer):
        await put(writer, 0)
        await put(writer, 1, num_bytes=1000)
        await put(writer, 2)
        await writer.join()
    assert disk.transactions == [[b"0"], [b"1"], [b"2"]]


@pytest.mark.parametrize(
    "limits", [replace(LIMITS, waiting_bytes=45), replace(LIMITS, waiting_groups=4)], ids=["bytes", "groups"]
)
async def test_a_producer_beyond_the_limit_waits_and_nothing_is_dropped(limits: WriteLimits) -> None:
    disk = Disk()
    disk.free.clear()
    writer: GroupWriter[int] = GroupWriter(disk, "w", limits)
    async with consuming(writer) as consumer:
        putting = [asyncio.create_task(put(writer, number)) for number in range(12)]
        await reached(lambda: disk.at_once == 1)
        assert await blocked(*putting[4:])
        assert [task.done() for task in putting[:4]] == [True] * 4
        assert (writer.num_groups, writer.num_bytes) == (4, 40)
        disk.free.set()
        await asyncio.gather(*putting)
        await writer.join()
    assert [context for context, _ in consumer.found] == list(range(12))


async def test_a_large_group_that_waits_for_room_is_not_overtaken_by_small_ones() -> None:
    disk = Disk()
    disk.free.clear()
    writer: GroupWriter[int] = GroupWriter(disk, "w", replace(LIMITS, waiting_bytes=45))
    async with consuming(writer) as consumer:
        await put(writer, 0, num_bytes=40)
        await reached(lambda: disk.at_once == 1)
        large = asyncio.create_task(put(writer, 1, num_bytes=30))
        assert await blocked(large)
        small = asyncio.create_task(put(writer, 2, num_bytes=5))
        assert await blocked(small)
        disk.free.set()
        await asyncio.gather(large, small)
        await writer.join()
    assert [context for context, _ in consumer.found] == [0, 1, 2]


async def test_the_next_transaction_waits_until_the_consumer_is_ready() -> None:
    disk = Disk()
    writer: GroupWriter[int] = GroupWriter(disk, "w", replace(LIMITS, batch_groups=1))
    await put(writer, 0)
    await put(writer, 1)
    batches = writer.batches()
    await anext(batches)
    joining = asyncio.create_task(writer.join())
    assert await blocked(joining)
    assert disk.transactions == [[b"0"]]
    await anext(batches)
    assert disk.transactions == [[b"0"], [b"1"]]
    joining.cancel()
    await batches.aclose()  # type: ignore[attr-defined]


async def test_a_full_disk_is_waited_for_and_the_same_transaction_repeated() -> None:
    disk = Disk()
    disk.errors = [DiskFullError("full"), DiskFullError("full")]
    writer: GroupWriter[int] = GroupWriter(disk, "w", LIMITS)
    await put(writer, 0)
    async with consuming(writer) as consumer:
        await writer.join()
    assert consumer.found == [(0, "0")]
    assert len(disk.submission_ids) == 3
    assert len(set(disk.submission_ids)) == 1


async def test_a_disk_that_stays_full_is_an_error_at_last() -> None:
    disk = Disk()
    disk.errors = [DiskFullError("full")] * 1000
    writer: GroupWriter[int] = GroupWriter(disk, "w", replace(LIMITS, full_disk_wait_s=0.2))
    await put(writer, 0)
    with pytest.raises(DiskFullError):
        await anext(writer.batches())
    assert len(disk.submission_ids) > 1


async def test_a_full_disk_is_not_waited_for_while_stopping() -> None:
    disk = Disk()
    disk.errors = [DiskFullError("full")]
    writer: GroupWriter[int] = GroupWriter(disk, "w", LIMITS)
    await put(writer, 0)
    writer.close_input()
    with pytest.raises(DiskFullError):
        await anext(writer.batches())


async def test_other_failures_of_the_storage_end_the_writer() -> None:
    disk = Disk()
    disk.errors = [StorageError("gone")]
    writer: GroupWriter[int] = GroupWriter(disk, "w", LIMITS)
    await put(writer, 0)
    with pytest.raises(StorageError, match="gone"):
        await anext(writer.batches())


class WideDisk:
    """Publishes transactions side by side; each waits for its number to be `let_go`."""

    def __init__(self) -> None:
        self.transactions: list[list[bytes]] = []
        self.submission_ids: set[str] = set()
        self.free = [threading.Event() for _ in range(20)]
        self.errors: dict[int, StorageError] = {}

    def let_go(self, *numbers: int) -> None:
        for number in numbers:
            self.free[number].set()

    def publish_groups(self, items: Sequence[tuple[EncodedGroup, bytes]], *, submission_id: str) -> list[GroupRef]:
        number = len(self.transactions)
        self.submission_ids.add(submission_id)
        self.transactions.append([lease for _, lease in items])
        assert self.free[number].wait(20)
        if number in self.errors:
            raise self.errors[number]
        return [replace_digest(lease) for _, lease in items]


WIDE = replace(LIMITS, max_delay_s=0.0, overlap_bytes=20)


async def test_what_waits_is_shared_between_two_transactions_that_run_at_once() -> None:
    disk = WideDisk()
    writer: GroupWriter[int] = GroupWriter(disk, "w", WIDE)
    for number in range(4):
        await put(writer, number)
    async with consuming(writer) as consumer:
        await reached(lambda: len(disk.transactions) == 2)
        disk.let_go(0, 1)
        await writer.join()
    assert sorted(disk.transactions) == [[b"0", b"1"], [b"2", b"3"]]
    assert len(disk.submission_ids) == 2
    assert consumer.found == [(number, str(number)) for number in range(4)]


async def two_begun(writer: GroupWriter[int], disk: WideDisk) -> None:
    """One transaction with the first group runs, then one with two more beside it."""
    await put(writer, 0)
    await reached(lambda: len(disk.transactions) == 1)
    await put(writer, 1)
    await put(writer, 2)
    await reached(lambda: len(disk.transactions) == 2)


async def test_a_transaction_that_ends_before_an_older_one_comes_out_after_it() -> None:
    disk = WideDisk()
    writer: GroupWriter[int] = GroupWriter(disk, "w", WIDE)
    async with consuming(writer) as consumer:
        await two_begun(writer, disk)
        disk.let_go(1)
        assert await blocked(consumer.task)
        assert consumer.found == []
        assert writer.num_groups == 3
        disk.let_go(0)
        await writer.join()
    assert [context for context, _ in consumer.found] == [0, 1, 2]


async def test_little_that_waits_begins_no_second_transaction() -> None:
    disk = WideDisk()
    writer: GroupWriter[int] = GroupWriter(disk, "w", WIDE)
    async with consuming(writer) as consumer:
        await put(writer, 0)
        await reached(lambda: len(disk.transactions) == 1)
        await put(writer, 1)
        assert await blocked(consumer.task)
        assert len(disk.transactions) == 1
        disk.let_go(0, 1)
        await writer.join()
    assert disk.transactions == [[b"0"], [b"1"]]


async def test_no_more_than_two_transactions_run_and_the_bound_on_what_waits_counts_them() -> None:
    disk = WideDisk()
    writer: GroupWriter[int] = GroupWriter(disk, "w", replace(WIDE, batch_groups=2, waiting_bytes=65))
    async with consuming(writer) as consumer:
        putting = [asyncio.create_task(put(writer, number)) for number in range(10)]
        await reached(lambda: len(disk.transactions) == 2)
        assert await blocked(*putting[6:])
        assert len(disk.transactions) == 2
        assert (writer.num_groups, writer.num_bytes) == (6, 60)
        disk.let_go(*range(20))
        await asyncio.gather(*putting)
        await writer.join()
    assert [context for context, _ in consumer.found] == list(range(10))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in_order", "the_later_first"])
async def test_nothing_comes_out_beside_or_after_a_transaction_that_failed(order: tuple[int, int]) -> None:
    disk = WideDisk()
    disk.errors = {0: StorageError("gone")}
    writer: GroupWriter[int] = GroupWriter(disk, "w", WIDE)
    async with consuming(writer) as consumer:
        await two_begun(writer, disk)
        disk.let_go(*order)
        with pytest.raises(StorageError, match="gone"):
            await consumer.task
    assert consumer.found == []
    disk.let_go(1)


async def test_a_later_transaction_that_failed_is_told_when_the_older_ones_are_out() -> None:
    disk = WideDisk()
    disk.errors = {1: StorageError("gone")}
    writer: GroupWriter[int] = GroupWriter(disk, "w", WIDE)
    async with consuming(writer) as consumer:
        await two_begun(writer, disk)
        disk.let_go(1)
        assert await blocked(consumer.task)
        disk.let_go(0)
        with pytest.raises(StorageError, match="gone"):
            await consumer.task
    assert consumer.found == [(0, "0")]
