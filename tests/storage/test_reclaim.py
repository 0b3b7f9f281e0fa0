"""What is deleted from a pool, and what never is."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.pool import Pool
from storage.positions import PositionRanges
from storage.queue import GroupQueue
from storage.queue_types import GroupReturn, LeasedGroup, LeaseState, Stage
from storage.reclaim import Reclaimed
from storage.summary import summarize
from tests.storage.queue_helpers import finish, producers_root, publish, queue_of_two, samples_of, submit
from vime.errors import CorruptDataError, StaleLeaseError, StorageError

NOTHING = Reclaimed()


@pytest.fixture(autouse=True)
def tiny_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.segment_list.MAX_SEGMENT_GROUPS", 2)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "pool"


@pytest.fixture
def opened(root: Path) -> Iterator[tuple[Pool, Pool, GroupQueue]]:
    with queue_of_two(root) as opened:
        yield opened


def packs(root: Path) -> set[Path]:
    return set(root.glob("raw/*/*/*.pack"))


def journals(root: Path) -> int:
    return len(list(root.glob("queues/*/control/journal.log")))


def finish_two(producer: Pool, queue: GroupQueue) -> list[LeasedGroup]:
    leased = queue.lease("w", 2)
    for group in leased:
        finish(producer, queue, group)
    return leased


def train(queue: GroupQueue, *positions: int) -> None:
    trained = PositionRanges.of(positions)
    queue.rotate("main", trained, trained)


def test_results_go_when_they_are_released_and_not_before(opened: tuple[Pool, Pool, GroupQueue], root: Path) -> None:
    pool, producer, queue = opened
    finish_two(producer, queue)
    refs = [group.ref for group in queue.accepted()]
    queue.rotate("main", PositionRanges([(0, 1)]), PositionRanges())
    assert queue.collect_garbage() == NOTHING
    assert [pool.read_group(ref) for ref in refs]

    queue.rotate("main", PositionRanges([(0, 1)]), PositionRanges([(0, 0)]))
    assert queue.collect_garbage().packs == 1
    assert not (root / refs[0].path).exists()
    assert pool.read_group(refs[1])
    assert queue.released == PositionRanges([(0, 0)])


def test_the_pack_that_a_writer_appends_to_stays(opened: tuple[Pool, Pool, GroupQueue], root: Path) -> None:
    _, producer, queue = opened
    finish_two(producer, queue)
    newest = max(packs(root), key=lambda path: path.stat().st_mtime_ns)
    train(queue, 0, 1)
    queue.collect_garbage()
    assert newest in packs(root)


def test_a_pack_that_grows_stays_though_the_clock_went_back_and_another_looks_newer(
    opened: tuple[Pool, Pool, GroupQueue], root: Path
) -> None:
    _, producer, queue = opened
    finish_two(producer, queue)
    train(queue, 0, 1)
    newest = max(packs(root), key=lambda path: path.stat().st_mtime_ns)
    os.utime(newest, (0, 0))
    submit(queue, 2, 4)
    (held,) = queue.lease("w", 1)
    queue.collect_garbage()
    (later,) = queue.lease("w", 1)
    with newest.open("ab") as pack:
        pack.write(b"a group of the later lease")
    os.utime(newest, (0, 0))
    queue.release([held.lease], "so that only the later lease is out")
    queue.collect_garbage()
    assert newest in packs(root)
    queue.release([later.lease], "so that nobody can have written anything that counts")
    queue.collect_garbage()
    assert newest not in packs(root)


def test_prompts_stay_as_long_as_their_groups_can_be_generated(opened: tuple[Pool, Pool, GroupQueue]) -> None:
    pool, producer, queue = opened
    (first,) = queue.lease("w", 1)
    submit(queue, 2, 4)
    finish(producer, queue, first)
    queue.collect_garbage()
    waiting = queue.lease("w", 3)
    assert [pool.read_blob(group.prompt_ref) for group in waiting]


def test_samples_of_a_returned_group_stay_until_it_goes_on(opened: tuple[Pool, Pool, GroupQueue], root: Path) -> None:
    pool, producer, queue = opened
    (first,) = queue.lease("w", 1)
    partial = publish(producer, first)
    queue.yield_groups([GroupReturn(first.lease, partial, Stage.PARTIAL, 1)])
    publish(producer, first, "a later pack")
    assert queue.collect_garbage() == NOTHING
    (again,) = queue.lease("w", 1)
    assert pool.read_group(again.prompt_ref)
    finish(producer, queue, again)
    assert queue.collect_garbage().packs == 2
    assert not (root / partial.path).exists()


def test_what_is_published_but_not_accepted_yet_stays_while_its_lease_holds(
    opened: tuple[Pool, Pool, GroupQueue],
) -> None:
    """A producer publishes into one pack, goes on to the next, and only then tells the queue of the first."""
    pool, producer, queue = opened
    slow, quick = queue.lease("w", 2)
    ref = publish(producer, slow)
    finish(producer, queue, quick)
    for _ in range(3):
        assert queue.collect_garbage() == NOTHING
    queue.accept(slow.lease, ref, summarize(samples_of(0)))
    assert pool.read_group(ref)


def test_what_a_lost_attempt_published_goes_when_the_leases_of_its_time_have_ended(
    opened: tuple[Pool, Pool, GroupQueue], root: Path
) -> None:
    _, producer, queue = opened
    lost, other = queue.lease("w", 2)
    orphan = publish(producer, lost)
    queue.release([lost.lease], "aborted")
    result = publish(producer, other)
    assert queue.collect_garbage() == NOTHING  # for all that is known, the other lease published it
    queue.accept(other.lease, result, summarize(samples_of(1)))
    assert queue.collect_garbage().packs == 1
    assert not (root / orphan.path).exists()


def test_an_owner_keeps_packs_over_restarts_until_it_lets_go(opened: tuple[Pool, Pool, GroupQueue], root: Path) -> None:
    pool, producer, queue = opened
    finish_two(producer, queue)
    first = queue.accepted()[0].ref
    queue.retain("archive", [first])
    train(queue, 0, 1)
    queue.collect_garbage()
    queue.close()
    with GroupQueue.open(pool, owner="test", lease_seconds=60) as restarted:
        restarted.collect_garbage()
        assert pool.read_group(first)
        restarted.let_go("archive")
        restarted.let_go("nobody")
        assert restarted.collect_garbage().packs == 1
        assert not (root / first.path).exists()


def test_a_segment_that_ended_for_good_loses_its_journal_and_answers_late_calls(
    opened: tuple[Pool, Pool, GroupQueue], root: Path
) -> None:
    pool, producer, queue = opened
    leased = finish_two(producer, queue)
    train(queue, 0, 1)
    assert journals(root) == 2
    assert queue.collect_garbage().journals == 1
    assert journals(root) == 1

    late, ref = leased[0], publish(producer, leased[0])
    assert queue.heartbeat([late.lease]) == [LeaseState.STALE]
    assert queue.release([late.lease], "late") == [False]
    assert queue.yield_groups([GroupReturn(late.lease, ref, Stage.PARTIAL)]) == [False]
    with pytest.raises(StaleLeaseError, match="accept group 0, attempt 1"):
        queue.accept(late.lease, ref, summarize(samples_of(0)))
    with pytest.raises(StaleLeaseError, match="drop group 0, attempt 1"):
        queue.drop(late.lease, "late")
    with pytest.raises(StorageError, match=r"Segment 0 .* was reclaimed"):
        submit(queue, 0, 2)
    queue.record_trained("main", 0, 1, [0, 1])
    queue.close()
    with GroupQueue.open(pool, owner="test", lease_seconds=60) as restarted:
        restarted.reopen(PositionRanges())
        assert restarted.facts().num_accepted == 2
        assert restarted.accepted() == []


def test_garbage_of_earlier_sessions_goes_whole(root: Path) -> None:
    with (
        Pool.create(root, "run") as pool,
        Pool.open(producers_root(root)) as producer,
        GroupQueue.open(pool, owner="test", lease_seconds=60) as queue,
    ):
        queue.begin_session("first")
        submit(queue, 0, 2)
        finish_two(producer, queue)
        train(queue, 0, 1)
    shutil.rmtree(root / "vime" / "ended_writers")  # as if all had been killed
    with Pool.open(root) as again, GroupQueue.open(again, owner="test", lease_seconds=60) as later:
        later.begin_session("first")  # the coordinator was restarted: its producers live
        assert later.collect_garbage() == Reclaimed(journals=1)
        assert len(packs(root)) == 2
        later.begin_session("second")
        later.collect_garbage()
        assert packs(root) == set()
        assert list(root.glob("control/writers/*/*")) == []
        submit(later, 2, 4)
        assert [again.read_blob(group.prompt_ref) for group in later.lease("w", 2)]


def test_the_last_pack_of_a_producer_goes_once_its_pool_is_closed(
    opened: tuple[Pool, Pool, GroupQueue], root: Path
) -> None:
    _, producer, queue = opened
    finish_two(producer, queue)
    train(queue, 0, 1)
    queue.collect_garbage()
    before = packs(root)
    producer.close()
    assert queue.collect_garbage().packs == 1
    assert len(packs(root)) == len(before) - 1 == 1  # that of the coordinator, which may go on with it


def test_a_half_made_segment_is_removed(opened: tuple[Pool, Pool, GroupQueue], root: Path) -> None:
    _, _, queue = opened
    orphan = root / "queues" / "orphan"
    orphan.mkdir()
    (orphan / "run.json").write_text(json.dumps({"queue_id": "groups-orphan"}))
    other = root / "queues" / "other"
    other.mkdir()
    (other / "run.json").write_text(json.dumps({"queue_id": "somebody's"}))
    assert queue.collect_garbage().journals == 1
    assert not orphan.exists()
    assert other.exists()


def test_a_copied_pool_goes_on_reclaiming(opened: tuple[Pool, Pool, GroupQueue], root: Path, tmp_path: Path) -> None:
    _, producer, queue = opened
    finish_two(producer, queue)
    copy = Path(shutil.copytree(root, tmp_path / "copy"))
    with Pool.open(copy, segment_bytes=1) as pool, GroupQueue.open(pool, owner="test", lease_seconds=60) as copied:
        copied.begin_session("copy")
        train(copied, 0, 1)
        assert copied.collect_garbage().packs == 3
        assert copied.facts().num_accepted == 2
    assert [producer.read_group(group.ref) for group in queue.accepted()]


def test_a_damaged_record_of_what_was_released_is_refused(opened: tuple[Pool, Pool, GroupQueue]) -> None:
    pool, _, queue = opened
    train(queue, 0)
    queue.close()
    (pool.control_dir / "released.json").write_bytes(b"{")
    with pytest.raises(CorruptDataError, match=r"released\.json can't be read"):
        GroupQueue.open(pool, owner="test", lease_seconds=60)


@pytest.mark.parametrize("failing", ["unlink", "write"])
def test_a_failed_collection_changes_no_fact(
    failing: str, opened: tuple[Pool, Pool, GroupQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, producer, queue = opened
    finish_two(producer, queue)
    facts = queue.facts()
    with monkeypatch.context() as patch:
        if failing == "unlink":
            train(queue, 0)
            patch.setattr("pathlib.Path.unlink", _refuse)
            with pytest.raises(StorageError, match="Read-only file system"):
                queue.collect_garbage()
        else:
            patch.setattr("os.fsync", _refuse)
            with pytest.raises(StorageError, match="Read-only file system"):
                train(queue, 0)
            assert queue.released == PositionRanges()
    assert queue.facts() == facts
    train(queue, 0)
    assert queue.collect_garbage().packs == 1


def _refuse(*_: object, **__: object) -> None:
    raise OSError(30, os.strerror(30))
