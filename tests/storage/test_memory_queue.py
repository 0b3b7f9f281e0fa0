"""What is particular to the queue in memory: when payloads are released, and what a commit gives back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from recovery.accounting import count_identity
from storage.memory_parts import PartTable
from storage.memory_pool import MemoryPool
from storage.memory_queue import MemoryQueue
from storage.pool import Pool
from storage.positions import SEGMENT_SPAN, PositionRanges
from storage.queue_types import MemorySnapshot
from storage.step_log import StepLog
from storage.summary import summarize
from tests.storage.queue_helpers import cursor_at, finish, new_memory_queue, prompts, publish, samples_of, submit
from tests.storage.test_queue_schedules import Schedules
from vime.errors import CorruptDataError, StaleLeaseError, StorageError


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[MemoryPool, MemoryQueue, PartTable[bytes]]]:
    parts: PartTable[bytes] = PartTable()
    pool = MemoryPool("run", parts)
    with MemoryQueue(pool, StepLog(tmp_path), lease_seconds=60) as queue:
        submit(queue, 0, 4)
        yield pool, queue, parts


def resumed(
    folder: Path, queue: MemoryQueue, trained: PositionRanges, num_groups: int
) -> tuple[MemoryPool, MemoryQueue]:
    """A queue in a new process, from what a commit kept of `queue`."""
    snapshot = queue.snapshot(trained)
    queue.close()
    pool, again = new_memory_queue(folder)
    unfinished = [task for first, last in snapshot.unfinished for task in prompts(first, last + 1)]
    again.restore(snapshot, trained, unfinished, cursor_at(num_groups))
    return pool, again


def test_payloads_stay_until_their_groups_are_trained(
    opened: tuple[MemoryPool, MemoryQueue, PartTable[bytes]],
) -> None:
    pool, queue, parts = opened
    first, second = queue.lease("w", 2)
    receipts = [finish(pool, queue, leased) for leased in (first, second)]
    plan_ref = pool.publish_blob(b"plan", submission_id="plan")
    queue.record_plan("main/0", [receipts[0].position], plan_ref)
    refs = [group.ref for group in queue.accepted()]
    assert len(parts) == 4 + 2 + 1

    queue.record_trained("main", 0, 1, [receipts[0].position])

    with pytest.raises(StorageError, match="is not there: the queue in memory keeps it until its group is trained"):
        pool.read_columns(refs[0], ["tokens"])
    with pytest.raises(StorageError, match="is not there"):
        pool.read_blob(plan_ref)
    assert pool.read_columns(refs[1], ["tokens"])["tokens"].size == 10
    assert len(parts) == 3 + 1


def test_a_refused_result_is_released(opened: tuple[MemoryPool, MemoryQueue, PartTable[bytes]]) -> None:
    pool, queue, parts = opened
    leased = queue.lease("w", 1)[0]
    queue.release([leased.lease], "aborted")
    ref = publish(pool, leased)
    before = len(parts)
    with pytest.raises(StaleLeaseError):
        queue.accept(leased.lease, ref, summarize(samples_of(0)))
    assert len(parts) == before - 1


def test_a_rotation_forgets_what_has_come_to_an_end(
    opened: tuple[MemoryPool, MemoryQueue, PartTable[bytes]],
) -> None:
    pool, queue, parts = opened
    trained, dropped, late = queue.lease("w", 3)
    finish(pool, queue, trained)
    queue.drop(dropped.lease, "reward")
    queue.record_trained("main", 0, 1, [0])
    queue.rotate("main", PositionRanges([(0, 0)]))
    assert len(parts) == 2
    with pytest.raises(StaleLeaseError, match="came to its end before"):
        finish(pool, queue, trained)
    queue.record_trained("main", 0, 1, [0])
    finish(pool, queue, late)


def test_a_resume_hands_out_every_group_that_the_commit_does_not_call_trained(tmp_path: Path) -> None:
    pool, queue = new_memory_queue(tmp_path, 6)
    trained_group, dropped, pending, in_flight = queue.lease("w", 4)
    finish(pool, queue, trained_group)
    finish(pool, queue, pending)
    queue.drop(dropped.lease, "reward")
    queue.record_trained("main", 0, 1, [0])
    trained = PositionRanges([(0, 0)])
    assert queue.snapshot(trained) == MemorySnapshot([(2, 5)], {"reward": 1})

    pool, again = resumed(tmp_path, queue, trained, 6)

    with again:
        identity = count_identity(again.facts(), trained)
        assert identity.holds
        assert (identity.generated, identity.trained, identity.pending, identity.dropped) == (2, 1, 0, {"reward": 1})
        assert again.cursor() == cursor_at(6)
        assert again.highest_trained_version() == 1
        again.reopen(trained)
        leased = again.lease("w", 9)
        assert [group.group_index for group in leased] == [2, 3, 4, 5]
        with pytest.raises(StaleLeaseError):
            finish(pool, again, in_flight)
        assert finish(pool, again, leased[0]).position == SEGMENT_SPAN
        assert again.snapshot(trained).num_unfinished == 4


def test_a_commit_that_leaves_groups_out_is_refused(tmp_path: Path) -> None:
    _, queue = new_memory_queue(tmp_path)
    with queue, pytest.raises(CorruptDataError, match="1 trained, 2 unfinished and 1 dropped groups of 5"):
        queue.restore(
            MemorySnapshot([(1, 2)], {"reward": 1}), PositionRanges([(0, 0)]), prompts(1, 3), cursor_at(5)
        )  # fmt: skip


def test_a_reference_into_a_pool_on_disk_is_refused(tmp_path: Path) -> None:
    with Pool.create(tmp_path / "pool", "run") as disk:
        ref = disk.publish_blob(b"x", submission_id="1")
    with pytest.raises(StorageError, match="lies in a pool on disk, not in memory"):
        MemoryPool("run", PartTable()).read_blob(ref)


class MemorySchedules(Schedules):
    """The same schedules; a restart goes back to a commit, and untrained groups are generated again."""

    def open_queue(self, root: Path) -> tuple[MemoryPool, MemoryQueue]:
        return new_memory_queue(root)

    @rule(pick=st.integers(0, 10**6))
    def restart_from_a_commit(self, pick: int) -> None:  # noqa: ARG002 - as the rule that it replaces
        trained = PositionRanges.of(self.trained)
        assert isinstance(self.queue, MemoryQueue)
        self.pool, self.queue = resumed(self.root / "pool", self.queue, trained, self.num_groups)
        self.stale += self.held
        self.held = []
        self.accepted = {index: p for index, p in self.accepted.items() if p in trained}
        self.leased_before = self.accepted.keys() | self.dropped.keys()


TestMemorySchedules = MemorySchedules.TestCase
TestMemorySchedules.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
