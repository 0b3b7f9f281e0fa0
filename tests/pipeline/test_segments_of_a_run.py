"""A run over many segments: what it remembers, and going back to an older commit."""

import asyncio
from pathlib import Path

import pytest

from pipeline.coordinator import Coordinator
from recovery.audit import audit_run
from storage.segments import read_segments
from tests.pipeline.mini_stream import BATCH, ROLLOUTS, MiniStream, run_session

TRAINED = ROLLOUTS * BATCH


@pytest.fixture(autouse=True)
def a_segment_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.segment_list.MAX_SEGMENT_GROUPS", 1)
    monkeypatch.setattr("storage.step_log.MAX_LOG_BYTES", 0)


def segments_of(run: Path) -> list[bool]:
    """For each segment whether it is closed."""
    path = run / "rollout_data" / "pool" / "vime" / "queue.json"
    return [entry.summary is not None for entry in read_segments(path)]


def test_commits_leave_closed_segments_behind_and_the_audit_reads_all(tmp_path: Path) -> None:
    run_session(tmp_path)
    assert segments_of(tmp_path) == [True, True, False]
    report = audit_run(tmp_path)
    assert (report.trained, report.lost, report.trained_twice) == (TRAINED, [], [])


@pytest.mark.parametrize("commit", [1, 3])
def test_a_resume_from_an_older_commit_trains_groups_of_closed_segments_anew(tmp_path: Path, commit: int) -> None:
    run_session(tmp_path)
    stream = MiniStream(tmp_path, ckpt_step=commit)
    try:
        identity = stream.coordinator.identity()
        assert identity.holds
        assert (identity.trained, identity.pending) == ((commit + 1) * BATCH, TRAINED - (commit + 1) * BATCH)
        assert stream.coordinator.counts().pending == identity.pending
        asyncio.run(stream.run())
        assert stream.coordinator.identity().trained == TRAINED
    finally:
        stream.close()
    report = audit_run(tmp_path)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], TRAINED)
    assert report.rolled_back == TRAINED - (commit + 1) * BATCH
    assert report.identity_holds


def test_resuming_from_older_and_older_commits_still_trains_every_group_once(tmp_path: Path) -> None:
    for commit in (None, 3, 1):
        run_session(tmp_path, ckpt_step=commit)
    report = audit_run(tmp_path)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], TRAINED)


def test_a_restarted_coordinator_of_the_same_branch_knows_what_closed_segments_held(tmp_path: Path) -> None:
    """Its settings still name the commit that the session began with; the step log knows the rest."""
    trained: list[tuple[int, int]] = []

    def restart(point: str) -> None:
        if point == "rotated":
            old: Coordinator = stream.coordinator
            before = (old.identity(), old.highest_version())
            stream.restart_coordinator()
            now = stream.coordinator
            assert (now.identity(), now.highest_version()) == before
            assert now.counts().trained == before[0].trained
            trained.append((before[0].trained, before[0].pending))

    (tmp_path / "training_log").mkdir()
    stream = MiniStream(tmp_path, restart)
    try:
        asyncio.run(stream.run())
    finally:
        stream.close()
    assert [count for count, _ in trained] == [2 * BATCH, 4 * BATCH, 6 * BATCH]
    assert audit_run(tmp_path).lost == []
