"""What a rotation leaves behind, and what it must not touch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from storage.pool import Pool
from storage.positions import SEGMENT_SPAN, PositionRanges
from storage.queue import GroupQueue
from storage.queue_types import ClosedSegment, LeaseState, QueueFacts
from storage.segments import read_segments
from storage.summary import summarize
from tests.storage.queue_helpers import cursor_at, finish, new_queue, prompts, publish, samples_of, submit
from vime.errors import CorruptDataError, SchemaVersionError, StaleLeaseError, StorageError

NOTHING = PositionRanges()


@pytest.fixture(autouse=True)
def tiny_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.segment_list.MAX_SEGMENT_GROUPS", 2)
    monkeypatch.setattr("storage.step_log.MAX_LOG_BYTES", 0)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[Pool, GroupQueue]]:
    """Groups 0 and 1 in a segment."""
    pool, queue = new_queue(tmp_path / "pool", 2)
    with pool, queue:
        yield pool, queue


def reopen(pool: Pool, queue: GroupQueue) -> GroupQueue:
    queue.close()
    return GroupQueue.open(pool, owner="test", lease_seconds=60)


def finish_all(pool: Pool, queue: GroupQueue) -> list[int]:
    return [finish(pool, queue, leased).position for leased in queue.lease("w", 100)]


def rotate(queue: GroupQueue, trained: list[int]) -> None:
    queue.rotate("main", PositionRanges.of(trained))


def test_a_segment_whose_groups_are_trained_is_closed_and_counted(opened: tuple[Pool, GroupQueue]) -> None:
    pool, queue = opened
    first, second = queue.lease("w", 2)
    finish(pool, queue, first)
    queue.drop(second.lease, "filtered")

    rotate(queue, [0])

    expected = QueueFacts([], [], {}, {}, [ClosedSegment(0, 1, {"filtered": 1})], cursor_at(2))
    assert queue.facts() == expected
    assert (queue.num_accepted, queue.accepted()) == (1, [])
    with reopen(pool, queue) as restarted:
        assert restarted.facts() == expected
        assert expected.num_groups == 2


def test_a_segment_with_an_untrained_or_unfinished_group_stays(opened: tuple[Pool, GroupQueue]) -> None:
    pool, queue = opened
    finish(pool, queue, queue.lease("w", 1)[0])
    rotate(queue, [0])
    assert queue.facts().fresh == [1]
    finish_all(pool, queue)
    rotate(queue, [0])
    assert queue.facts().closed == []
    rotate(queue, [0, 1])
    assert queue.facts().closed == [ClosedSegment(0, 2, {})]


def test_leases_live_on_across_a_rotation(opened: tuple[Pool, GroupQueue]) -> None:
    pool, queue = opened
    held = queue.lease("w", 2)
    rotate(queue, [])
    submit(queue, 2, 4)
    newer = queue.lease("w", 2)
    rotate(queue, [])

    assert queue.heartbeat([newer[0].lease, held[0].lease]) == [LeaseState.EXTENDED] * 2
    assert [group.attempt for group in held + newer] == [1] * 4
    assert finish(pool, queue, newer[0]).position == SEGMENT_SPAN
    assert finish(pool, queue, held[1]).position == 0
    assert queue.release([newer[1].lease, held[0].lease], "aborted") == [True, True]
    assert queue.release([newer[1].lease, held[0].lease], "aborted") == [True, True]
    assert [group.group_index for group in queue.lease("w", 4)] == [0, 3]


def test_older_segments_are_leased_first_and_new_prompts_go_to_the_newest(opened: tuple[Pool, GroupQueue]) -> None:
    pool, queue = opened
    rotate(queue, [])
    submit(queue, 2, 5)
    rotate(queue, [])
    submit(queue, 5, 6)
    assert [group.group_index for group in queue.lease("w", 6)] == [0, 1, 2, 3, 4, 5]
    queues = {entry.queue_id for entry in read_segments(pool.control_dir / "queue.json")}
    assert len(queues) == 3


def test_a_small_newest_segment_goes_on(opened: tuple[Pool, GroupQueue]) -> None:
    pool, queue = opened
    finish_all(pool, queue)
    rotate(queue, [0, 1])
    submit(queue, 2, 3)
    rotate(queue, [0, 1])
    rotate(queue, [0, 1])
    assert len(read_segments(pool.control_dir / "queue.json")) == 2
    assert queue.cursor() == cursor_at(3)


def test_a_long_journal_begins_a_new_segment_too(
    opened: tuple[Pool, GroupQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, queue = opened
    monkeypatch.setattr("storage.segment_list.MAX_SEGMENT_GROUPS", 100)
    rotate(queue, [])
    assert len(read_segments(pool.control_dir / "queue.json")) == 1
    monkeypatch.setattr("storage.segment_list.MAX_JOURNAL_BYTES", 1000)
    rotate(queue, [])
    assert len(read_segments(pool.control_dir / "queue.json")) == 2


def test_closed_segments_are_not_opened_at_start(opened: tuple[Pool, GroupQueue]) -> None:
    pool, queue = opened
    finish_all(pool, queue)
    rotate(queue, [0, 1])
    for journal in (pool.root / "queues").glob("*/control/journal.log"):
        if b'"prompt:0"' in journal.read_bytes():
            journal.write_bytes(b"unreadable")
    with reopen(pool, queue) as restarted:
        assert restarted.facts().num_accepted == 2
        restarted.reopen(PositionRanges([(0, 1)]))
        with pytest.raises(CorruptDataError, match="before its first whole transaction"):
            restarted.reopen(PositionRanges([(0, 0)]))


def test_resuming_from_before_a_segment_was_trained_brings_its_groups_back(opened: tuple[Pool, GroupQueue]) -> None:
    pool, queue = opened
    finish_all(pool, queue)
    before = queue.accepted()
    rotate(queue, [0, 1])
    with reopen(pool, queue) as restarted:
        assert restarted.accepted() == []
        restarted.reopen(PositionRanges([(1, 1)]))
        assert restarted.accepted(except_for=PositionRanges([(1, 1)])) == before[:1]
        assert restarted.facts().accepted == {0: 0, 1: 1}
        restarted.rotate("later", PositionRanges([(1, 1)]))
        assert restarted.facts().accepted == {0: 0, 1: 1}
        restarted.rotate("later", PositionRanges([(0, 1)]))
        assert restarted.facts().closed == [ClosedSegment(0, 2, {})]


def test_facts_add_up_to_the_same_with_and_without_rotations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for name, size in (("often", 1), ("never", 10**6)):
        monkeypatch.setattr("storage.segment_list.MAX_SEGMENT_GROUPS", size)
        pool, queue = new_queue(tmp_path / name)
        with pool, queue:
            trained: list[int] = []
            for start in range(0, 12, 3):
                submit(queue, start, start + 3)
                done, dropped, _ = queue.lease("w", 3)
                trained.append(finish(pool, queue, done).position)
                queue.drop(dropped.lease, f"reason {start % 2}")
                rotate(queue, trained)
            facts = queue.facts()
            counts.append(
                (facts.num_groups, facts.num_accepted, facts.dropped_by_reason(), facts.in_flight, facts.cursor)
            )
    assert counts[0] == counts[1]


def test_a_call_that_comes_late_is_answered_from_a_closed_segment(opened: tuple[Pool, GroupQueue]) -> None:
    pool, queue = opened
    early = queue.lease("w", 1)[0]
    queue.release([early.lease], "aborted")
    leased = queue.lease("w", 2)
    receipts = [finish(pool, queue, group) for group in leased]
    rotate(queue, [0, 1])

    assert queue.heartbeat([leased[0].lease]) == [LeaseState.STALE]
    assert queue.facts().accepted == {}
    assert queue.accept(leased[0].lease, publish(pool, leased[0]), summarize(samples_of(0))) == receipts[0]
    with pytest.raises(StaleLeaseError):
        finish(pool, queue, early)
    submit(queue, 0, 2)
    changed = prompts(0, 2)
    changed[0] = msgspec.structs.replace(changed[0], prompt="another")
    with pytest.raises(StorageError, match="group 0 has another prompt"):
        queue.submit_prompts(changed, cursor_at(2))
    assert queue.facts().num_groups == 2


def test_positions_that_no_segment_has_accepted_are_refused(opened: tuple[Pool, GroupQueue]) -> None:
    pool, queue = opened
    finish_all(pool, queue)
    rotate(queue, [0, 1])
    for first, last in ((1, 2), (SEGMENT_SPAN, SEGMENT_SPAN), (2 * SEGMENT_SPAN, 2 * SEGMENT_SPAN)):
        with pytest.raises(CorruptDataError, match="called trained, but segment"):
            queue.reopen(PositionRanges([(first, last)]))
    with pytest.raises(StorageError, match="allowed in segment 1: none"):
        queue.record_trained("main", 0, 1, [SEGMENT_SPAN])
    queue.record_trained("later", 0, 1, [0])


def test_a_segment_that_lost_submitted_groups_is_refused(opened: tuple[Pool, GroupQueue]) -> None:
    pool, queue = opened
    rotate(queue, [])
    queue.close()
    for journal in (pool.root / "queues").glob("*/control/journal.log"):
        data = journal.read_bytes()
        if b'"prompt:0"' in data:
            journal.write_bytes(data[: data.rfind(b"SLMTXN01")])
    with pytest.raises(CorruptDataError, match="ends at group 0, the next one begins at 2: submitted groups are miss"):
        GroupQueue.open(pool, owner="test", lease_seconds=60)


def test_a_list_of_an_older_schema_is_refused_with_what_to_do(opened: tuple[Pool, GroupQueue]) -> None:
    pool, _ = opened
    path = pool.control_dir / "queue.json"
    path.write_bytes(msgspec.json.encode({"schema_version": 3, "segments": []}))
    with pytest.raises(SchemaVersionError, match=r"version 3, this code reads 4: .* Finish the run with the vime"):
        read_segments(path)


def test_a_list_of_a_newer_schema_or_without_an_open_end_is_refused(opened: tuple[Pool, GroupQueue]) -> None:
    pool, _ = opened
    path = pool.control_dir / "queue.json"
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"schema_version":4', b'"schema_version":5'))
    with pytest.raises(SchemaVersionError, match="schema version 5, this code reads 4"):
        read_segments(path)
    path.write_bytes(content.replace(b'"index":0', b'"index":1'))
    with pytest.raises(CorruptDataError, match=r"numbered from 0 and the last one open, found \[\(1, 'open'\)\]"):
        read_segments(path)
