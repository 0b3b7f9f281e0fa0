"""Reclaim and disk reserve of a run."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest

from pipeline.messages import LeaseStatus
from pipeline.stall import StallWatch
from recovery.accounting import RECLAIMED
from recovery.audit import audit_run
from storage.positions import PositionRanges
from storage.reclaim import Reclaimed
from tests.pipeline.mini_stream import BATCH, ROLLOUTS, MiniStream, run_session
from tests.pipeline.test_coordinator import opened
from tests.pipeline.test_crash import kill_session
from vime.errors import CoordinatorBusyError, StalledError, StorageError

GIB = 2**30


@pytest.fixture(autouse=True)
def a_segment_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.segment_list.MAX_SEGMENT_GROUPS", 1)
    monkeypatch.setattr("storage.step_log.MAX_LOG_BYTES", 0)


def payload_bytes(run: Path) -> int:
    pool = run / "rollout_data" / "pool"
    return sum(path.stat().st_size for folder in ("raw", "queues") for path in (pool / folder).rglob("*.*"))


def test_the_pool_stays_as_small_after_twenty_rounds_as_after_six(tmp_path: Path) -> None:
    sizes: list[int] = []

    def measure(point: str) -> None:
        if point == "rotated":
            sizes.append(payload_bytes(tmp_path))

    stream = run_session(tmp_path, measure, rollouts=40, online_gc=True)
    assert stream.plan.start_rollout == 0
    assert len(sizes) == 20
    assert max(sizes[6:]) <= 1.2 * max(sizes[:6])
    report = audit_run(tmp_path)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], 40 * BATCH)
    assert report.identity_holds


def test_without_online_gc_everything_stays(tmp_path: Path) -> None:
    sizes: list[int] = []

    def measure(point: str) -> None:
        if point == "rotated":
            sizes.append(payload_bytes(tmp_path))

    run_session(tmp_path, measure, rollouts=12)
    assert sizes[-1] > 3 * sizes[0]


@pytest.mark.parametrize("point", ["publish", "accept", "train", "commit", "rotate", "rotated"])
def test_a_kill_while_storage_is_reclaimed_loses_nothing_and_repeats_nothing(tmp_path: Path, point: str) -> None:
    kill_session(tmp_path, point, 3, "gc")
    after_kill = audit_run(tmp_path)
    assert after_kill.identity_holds
    assert after_kill.lost == []
    run_session(tmp_path, online_gc=True)
    report = audit_run(tmp_path)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], ROLLOUTS * BATCH)
    assert report.identity_holds


def test_a_resume_from_a_kept_commit_loses_no_group(tmp_path: Path) -> None:
    run_session(tmp_path, online_gc=True)
    run_session(tmp_path, ckpt_step=3, online_gc=True)  # of commits 1, 3 and 5 the newest two are kept
    report = audit_run(tmp_path)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], ROLLOUTS * BATCH)
    assert report.dropped == {}
    assert report.identity_holds


def test_a_resume_from_an_older_commit_counts_what_was_reclaimed_as_dropped_and_goes_on(tmp_path: Path) -> None:
    run_session(tmp_path, online_gc=True)
    stream = MiniStream(tmp_path, ckpt_step=1, online_gc=True)
    try:
        identity = stream.coordinator.identity()
        assert identity.holds
        assert identity.dropped == {RECLAIMED: 2 * BATCH}
        assert stream.coordinator.counts().dropped == identity.dropped
        assert stream.coordinator.counts().pending == identity.pending == 2 * BATCH
        asyncio.run(stream.run())
        assert stream.coordinator.identity().trained == ROLLOUTS * BATCH
        assert stream.coordinator.identity().holds
    finally:
        stream.close()
    report = audit_run(tmp_path)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], ROLLOUTS * BATCH)
    assert report.identity_holds


def test_a_failed_collection_is_told_once_stops_nothing_else_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rights = []

    def collect(_: object) -> Reclaimed:
        if not rights:
            raise StorageError("reclaim storage: no rights.")
        return Reclaimed()

    monkeypatch.setattr("storage.queue.GroupQueue.collect_garbage", collect)
    coordinator = opened(tmp_path, online_gc=True)
    with caplog.at_level(logging.ERROR):
        coordinator.rotate(coordinator.queue_state(), PositionRanges())
        coordinator.rotate(coordinator.queue_state(), PositionRanges())
    assert caplog.text.count("storage is not reclaimed") == 1
    told = "Storage is not reclaimed, which is tried again: reclaim storage: no rights."
    assert coordinator.counts().notices == [told]
    assert coordinator.lease("w", 1).status is LeaseStatus.WORK
    rights.append("given")
    coordinator.rotate(coordinator.queue_state(), PositionRanges())
    assert coordinator.counts().notices == []
    coordinator.close()


def test_a_collection_by_a_replaced_coordinator_is_no_failure_of_the_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = opened(tmp_path, online_gc=True)
    monkeypatch.setattr("storage.lock.CoordinatorLock.still_mine", lambda _: False)
    with pytest.raises(CoordinatorBusyError):
        coordinator.rotate(coordinator.queue_state(), PositionRanges())
    coordinator.close()


def test_production_pauses_before_the_disk_is_full_and_says_need_against_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [GIB // 4]
    monkeypatch.setattr(
        "storage.disk_reserve.os.statvfs",
        lambda _: os.statvfs_result((4096, 4096, 10**9, 0, free[0] // 4096, 0, 0, 0, 0, 255)),
    )
    coordinator = opened(tmp_path, reserve_bytes=GIB)
    assert coordinator.lease("w", 1).status is LeaseStatus.DISK_LOW
    counts = coordinator.counts()
    (notice,) = counts.notices
    assert notice.startswith("Production is paused for want of space: ")
    assert "0.25 GiB are free, 1.00 GiB are needed (--rollout-disk-reserve-gib)" in notice
    watch = StallWatch(timeout_s=10, started_s=0)
    with pytest.raises(StalledError, match=r"0\.25 GiB are free, 1\.00 GiB are needed"):
        watch.check(counts, [], 4, now_s=11)

    free[0] = 2 * GIB
    assert coordinator.lease("w", 1).status is LeaseStatus.WORK
    assert coordinator.counts().notices == []
    coordinator.close()
