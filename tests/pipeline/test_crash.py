"""A kill at any step of the stream: nothing is lost, nothing is trained twice, the identity holds."""

import asyncio
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from recovery.audit import audit_run
from storage import segment_list
from storage.columns import decode_group
from storage.pool import Pool
from tests.pipeline.mini_stream import BATCH, MEMBERS, POINTS, ROLLOUTS, MiniStream, run_session

SCRIPT = Path(__file__).with_name("mini_stream.py")


@pytest.fixture(autouse=True, params=[1000, 1], ids=["one segment", "a segment a commit"])
def segment_groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.segment_list.MAX_SEGMENT_GROUPS", request.param)


def kill_session(run: Path, point: str, occurrence: int, *options: str) -> None:
    (run / "training_log").mkdir(parents=True, exist_ok=True)
    size = segment_list.MAX_SEGMENT_GROUPS
    command = [sys.executable, str(SCRIPT), str(run), point, str(occurrence), str(size), *options]
    process = subprocess.run(command, check=False)
    assert process.returncode == -9


@pytest.mark.parametrize("point", POINTS[:-1])
def test_kill_at_any_step_loses_nothing_and_repeats_nothing(tmp_path: Path, point: str) -> None:
    kill_session(tmp_path, point, 3)
    after_kill = audit_run(tmp_path)
    assert after_kill.identity_holds
    assert after_kill.lost == []
    run_session(tmp_path)
    report = audit_run(tmp_path)
    assert report.lost == []
    assert report.trained_twice == []
    assert report.trained == ROLLOUTS * BATCH
    assert report.identity_holds


def test_kill_after_kill_still_trains_every_group_once(tmp_path: Path) -> None:
    for occurrence, point in enumerate(("train", "accept", "commit", "training_completed", "publish"), 1):
        kill_session(tmp_path, point, min(occurrence, 2))
    run_session(tmp_path)
    report = audit_run(tmp_path)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], ROLLOUTS * BATCH)


def test_work_after_the_commit_is_rolled_back_and_trained_once_anew(tmp_path: Path) -> None:
    kill_session(tmp_path, "plan", 4)  # rollouts 0..2 are trained, 0..1 committed
    stream = MiniStream(tmp_path)
    try:
        identity = stream.coordinator.identity()
        assert stream.plan.commit_rollout == 1
        assert identity.holds
        assert identity.trained == 2 * BATCH
    finally:
        stream.close()
    assert audit_run(tmp_path).rolled_back == BATCH


def test_accepted_groups_outlive_the_session_that_made_them(tmp_path: Path) -> None:
    kill_session(tmp_path, "plan", 1)
    before = audit_run(tmp_path)
    stream = MiniStream(tmp_path)
    try:
        assert stream.coordinator.identity().pending == before.pending == 2 * BATCH
        assert stream.coordinator.counts().pending == before.pending
    finally:
        stream.close()


@pytest.mark.parametrize("point", ["publish", "accept", "train"])
def test_every_token_that_was_acknowledged_can_be_used_after_a_kill(tmp_path: Path, point: str) -> None:
    kill_session(tmp_path, point, 2)
    killed = audit_run(tmp_path)
    acknowledged = killed.pending + killed.trained
    stream = MiniStream(tmp_path)
    try:
        assert stream.coordinator.counts().pending == acknowledged, (
            "trained groups that no commit has are pending again"
        )
        groups = asyncio.run(stream.coordinator.wait_for_groups(acknowledged, 5))
    finally:
        stream.close()
    assert groups is not None
    with Pool.open(tmp_path / "rollout_data" / "pool") as pool:
        payloads = [decode_group(*vars(pool.read_group(group.ref)).values()) for group in groups]
    found = [(sample.index, sample.tokens) for payload in payloads for sample in payload]
    assert found == [(index, [1, 2, 3]) for index in range(acknowledged * MEMBERS)]


def test_running_books_agree_with_the_queue_at_every_step(tmp_path: Path) -> None:
    (tmp_path / "training_log").mkdir()
    mismatches = []
    stream: MiniStream

    def compare(point: str) -> None:
        identity, counts = stream.coordinator.identity(), stream.coordinator.counts()
        names = ("generated", "trained", "pending", "in_flight", "dropped")
        left, right = msgspec.structs.asdict(identity), msgspec.structs.asdict(counts)
        mismatches.extend((point, name) for name in names if left[name] != right[name])
        committed = stream.coordinator.queue_state().identity
        mismatches.extend((point, name) for name in names[:-1] if left[name] != committed[name])

    stream = MiniStream(tmp_path, compare)
    try:
        asyncio.run(stream.run())
    finally:
        stream.close()
    assert mismatches == []
