from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import straw
from straw.errors import QuotaExceeded

from storage.columns import encode_group
from storage.pool import Pool
from storage.positions import PositionRanges
from storage.queue import GroupQueue
from storage.queue_types import LeaseState
from storage.summary import summarize
from tests.storage.queue_helpers import finish, new_queue, publish, samples_of, submit
from vime.errors import CoordinatorBusyError, StorageError


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[Pool, GroupQueue]]:
    pool, queue = new_queue(tmp_path / "pool", 4)
    with pool, queue:
        yield pool, queue


def reopen(pool: Pool, queue: GroupQueue, lease_seconds: float = 60) -> GroupQueue:
    queue.close()
    return GroupQueue.open(pool, owner="test", lease_seconds=lease_seconds)


def test_releasing_again_changes_nothing_and_a_stale_release_is_told(opened: tuple[Pool, GroupQueue]) -> None:
    pool, queue = opened
    first, second = queue.lease("w", 2)
    assert queue.release([first.lease], "x") == [True]
    again = queue.lease("w", 1)[0]
    assert queue.release([first.lease], "x") == [True]
    assert queue.heartbeat([again.lease]) == [LeaseState.EXTENDED]
    with reopen(pool, queue) as restarted:
        assert restarted.release([second.lease], "x") == [False]


def test_accepting_twice_gives_the_same_receipt_even_after_a_restart(opened: tuple[Pool, GroupQueue]) -> None:
    pool, queue = opened
    leased = queue.lease("w", 1)[0]
    ref = publish(pool, leased)
    summary = summarize(samples_of(0))
    receipt = queue.accept(leased.lease, ref, summary)
    assert queue.accept(leased.lease, ref, summary) == receipt
    with reopen(pool, queue) as restarted:
        assert restarted.accept(leased.lease, ref, summary) == receipt
        assert restarted.num_accepted == 1


def test_many_restarts_never_fail_a_group(tmp_path: Path) -> None:
    pool, queue = new_queue(tmp_path / "pool", 1)
    with pool:
        for restart in range(6):
            leased = queue.lease("w", 1)[0]
            assert leased.attempt == restart + 1
            queue = reopen(pool, queue, lease_seconds=60 + restart)
        assert queue.facts().in_flight == [0]
        with queue:
            finish(pool, queue, queue.lease("w", 1)[0])


def test_summaries_are_read_from_the_pool_after_a_restart(opened: tuple[Pool, GroupQueue]) -> None:
    pool, queue = opened
    for leased in queue.lease("w", 3):
        finish(pool, queue, leased)
    before = queue.accepted()
    with reopen(pool, queue) as restarted:
        assert restarted.accepted() == before
        assert restarted.accepted(except_for=PositionRanges([(0, 1)])) == before[2:]


def test_plans_are_durable_and_may_overlap_between_branches(opened: tuple[Pool, GroupQueue]) -> None:
    pool, queue = opened
    for leased in queue.lease("w", 3):
        finish(pool, queue, leased)
    ref = pool.publish_blob(b"plan", submission_id="plan")
    queue.record_plan("main/0", [0, 2], ref)
    with reopen(pool, queue) as restarted:
        plan = restarted.plan("main/0")
        assert plan is not None
        assert plan.positions == [0, 2]
        assert pool.read_blob(plan.plan_ref) == b"plan"
        assert restarted.plan("main/1") is None
        restarted.record_plan("retry/0", [0, 1], ref)


def test_trained_records_of_all_branches_survive_a_restart(opened: tuple[Pool, GroupQueue]) -> None:
    pool, queue = opened
    for leased in queue.lease("w", 3):
        finish(pool, queue, leased)
    queue.record_trained("main", 0, 1, [0, 1])
    queue.record_trained("main", 0, 1, [0, 1])
    queue.record_trained("retry", 0, 1, [1, 2])
    with pytest.raises(StorageError, match="position 1 was trained by step 0 of branch 'main'"):
        queue.record_trained("main", 1, 2, [1, 2])
    with reopen(pool, queue) as restarted:
        trained = {branch: restarted.trained_by(branch).ranges() for branch in ("main", "retry")}
    assert trained == {"main": [(0, 1)], "retry": [(1, 2)]}


def test_a_second_queue_on_the_same_pool_is_refused(opened: tuple[Pool, GroupQueue]) -> None:
    pool, _ = opened
    with pytest.raises(CoordinatorBusyError, match="has a coordinator: the holder is 'test', process"):
        GroupQueue.open(pool, owner="second", lease_seconds=60)


def test_a_replaced_coordinator_is_fenced_where_flock_does_not_work(
    opened: tuple[Pool, GroupQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, zombie = opened
    leased = zombie.lease("w", 1)[0]
    monkeypatch.setattr("storage.lock.fcntl.flock", lambda *_: None)
    with Pool.open(pool.root) as other, GroupQueue.open(other, owner="successor", lease_seconds=60) as successor:
        for change in (
            lambda: zombie.lease("w", 1),
            lambda: zombie.heartbeat([leased.lease]),
            lambda: finish(pool, zombie, leased),
            lambda: zombie.drop(leased.lease, "x"),
            lambda: zombie.release([leased.lease], "x"),
            lambda: submit(zombie, 4, 5),
            lambda: zombie.record_trained("main", 0, 1, [0]),
        ):
            with pytest.raises(CoordinatorBusyError, match=r"epoch 1 of the queue in .* has ended: .*'successor'"):
                change()
        assert successor.facts().in_flight == [0]


@pytest.mark.parametrize(("phase", "accepted"), [("before_journal_write", {}), ("after_journal_sync", {0: 0})])
def test_a_queue_whose_journal_failed_refuses_until_it_is_reopened(
    phase: str, accepted: dict[int, int], tmp_path: Path
) -> None:
    failing: list[str] = []

    def fault(name: str) -> None:
        if name in failing:
            failing.clear()
            raise QuotaExceeded("No space left on device (os error 28)")

    with Pool.create(tmp_path / "pool", "run", fault=fault) as pool:
        queue = GroupQueue.open(pool, owner="test", lease_seconds=60)
        submit(queue, 0, 2)
        leased = queue.lease("w", 1)[0]
        ref, summary = publish(pool, leased), summarize(samples_of(0))
        failing.append(phase)
        with pytest.raises(StorageError, match=r"is full or over quota; \d+ bytes are free.*reopen the queue"):
            queue.accept(leased.lease, ref, summary)
        with pytest.raises(StorageError, match=r"Close and reopen the queue"):
            queue.accept(leased.lease, ref, summary)
        with reopen(pool, queue) as restarted:
            assert restarted.facts().accepted == accepted


@pytest.mark.slow
def test_a_hundred_groups_a_second_are_leased_and_accepted(tmp_path: Path) -> None:
    """The best of several rounds, since other work may share the machine."""
    pool, queue = new_queue(tmp_path / "pool", 100)
    seconds = []
    with pool, queue:
        for round_number in range(5):
            start = time.perf_counter()
            leased = queue.lease("w", 20)
            middle = time.perf_counter()
            items = [(encode_group(samples_of(group.group_index)), group.lease) for group in leased]
            refs = pool.publish_groups(items, submission_id=f"round {round_number}")
            summaries = [summarize(samples_of(group.group_index)) for group in leased]
            resumed = time.perf_counter()
            for group, ref, summary in zip(leased, refs, summaries, strict=True):
                queue.accept(group.lease, ref, summary)
            seconds.append(middle - start + time.perf_counter() - resumed)
        assert queue.num_accepted == 100
    assert min(seconds) < 20 / 100, f"{20 / min(seconds):.0f} groups/s"


def test_a_commit_keeps_nothing_of_a_queue_that_keeps_itself(opened: tuple[Pool, GroupQueue]) -> None:
    _, queue = opened
    assert queue.snapshot(PositionRanges()) is None


def test_only_leases_that_come_near_their_end_are_extended_before_their_results_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    pool, queue = new_queue(tmp_path / "pool", 2, lease_seconds=10, clock=lambda: now_s)
    asked: list[int] = []
    heartbeat = straw.Coordinator.heartbeat

    def counting(self: straw.Coordinator, leases: list[object]) -> object:
        asked.append(len(leases))
        return heartbeat(self, leases)

    monkeypatch.setattr(straw.Coordinator, "heartbeat", counting)
    with pool, queue:
        early, late = queue.lease("w", 2)
        now_s = 7.0
        assert finish(pool, queue, early).position == 0
        assert asked == []
        now_s = 9.9
        assert finish(pool, queue, late).position == 1
        assert asked == [1]


def test_a_worker_goes_on_under_the_next_coordinator_with_leases_for_the_same_groups(
    opened: tuple[Pool, GroupQueue],
) -> None:
    pool, queue = opened
    first, second = queue.lease("w", 2)
    with reopen(pool, queue) as restarted:
        taken = restarted.take_over("w", [first.lease, second.lease])
        assert None not in taken
        assert [group.group_index for group in restarted.lease("w", 4)] == [2, 3]
        assert restarted.heartbeat([lease or b"" for lease in taken]) == [LeaseState.EXTENDED] * 2
        assert restarted.take_over("w", [lease or b"" for lease in taken]) == taken, "a lease that holds stays"
        summary = summarize(samples_of(0))
        again = msgspec.structs.replace(first, lease=taken[0] or b"")
        assert restarted.accept(again.lease, publish(pool, again), summary).group_index == 0


def test_a_group_that_was_leased_again_or_has_ended_is_not_taken_over(opened: tuple[Pool, GroupQueue]) -> None:
    pool, queue = opened
    first, second, third = queue.lease("w", 3)
    finish(pool, queue, second)
    queue.release([third.lease], "x")
    queue.lease("v", 1)
    with reopen(pool, queue) as restarted:
        (other,) = restarted.lease("v", 1)
        assert other.group_index == 0
        assert restarted.take_over("w", [first.lease, second.lease, third.lease]) == [None] * 3
