"""The stream over a queue in memory: a kill costs what the newest commit doesn't hold, and nothing else."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from recovery.audit import audit_run
from recovery.restore import RestoreMode
from tests.pipeline.mini_stream import BATCH, POINTS, ROLLOUTS, MiniStream, run_session
from tests.pipeline.test_crash import kill_session


def run(folder: Path, ckpt_step: int | None = None) -> MiniStream:
    return run_session(folder, ckpt_step=ckpt_step, in_memory=True)


@pytest.mark.parametrize("point", POINTS[:-1])
def test_kill_at_any_step_skips_no_prompt_and_repeats_no_training(tmp_path: Path, point: str) -> None:
    kill_session(tmp_path, point, 3, "memory")
    after_kill = audit_run(tmp_path)
    assert after_kill.identity_holds
    assert after_kill.lost == []
    run(tmp_path)
    report = audit_run(tmp_path)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], ROLLOUTS * BATCH)
    assert report.identity_holds


def test_a_resume_generates_again_exactly_what_the_commit_did_not_train(tmp_path: Path) -> None:
    kill_session(tmp_path, "plan", 4, "memory")  # rollouts 0..2 are trained, 0..1 committed
    before = audit_run(tmp_path)
    assert (before.trained, before.rolled_back) == (2 * BATCH, BATCH)
    stream = MiniStream(tmp_path, in_memory=True)
    try:
        identity = stream.coordinator.identity()
        assert identity.holds
        assert (identity.generated, identity.trained, identity.pending) == (2 * BATCH, 2 * BATCH, 0)
        work = stream.coordinator.lease("w", 3).work
        assert [item.group_index for item in work] == [2 * BATCH, 2 * BATCH + 1, 2 * BATCH + 2]
    finally:
        stream.close()


def test_a_run_killed_before_its_first_commit_starts_anew(tmp_path: Path) -> None:
    kill_session(tmp_path, "plan", 1, "memory")
    stream = MiniStream(tmp_path, in_memory=True)
    try:
        assert stream.plan.mode is RestoreMode.NEW
        assert "its groups are gone: it starts anew" in stream.plan.words[0]
        assert stream.coordinator.identity().generated == 0
    finally:
        stream.close()


def test_an_older_commit_gives_back_what_later_ones_had_trained(tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path, ckpt_step=1)
    report = audit_run(tmp_path)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], ROLLOUTS * BATCH)
    assert report.rolled_back == (ROLLOUTS - 2) * BATCH


def test_versions_that_any_session_trained_under_are_remembered(tmp_path: Path) -> None:
    kill_session(tmp_path, "plan", 2, "memory")
    stream = MiniStream(tmp_path, in_memory=True)
    try:
        assert stream.coordinator.highest_version() == 1
    finally:
        stream.close()


def test_memory_holds_only_what_is_not_trained(tmp_path: Path) -> None:
    """Twelve groups at most: two batches untrained with payload and prompt, prompts up to a refill, and a plan."""
    (tmp_path / "training_log").mkdir()
    kept = []
    stream = MiniStream(tmp_path, lambda point: kept.append((point, stream.num_kept)), in_memory=True)
    try:
        asyncio.run(stream.run())
    finally:
        stream.close()
    after_training = [number for point, number in kept if point == "save"]
    assert len(after_training) == ROLLOUTS // 2
    assert max(after_training) <= 2 * (2 * BATCH) + 8


def test_running_books_agree_with_the_queue_at_every_step(tmp_path: Path) -> None:
    (tmp_path / "training_log").mkdir()
    names = ("generated", "trained", "pending", "in_flight", "dropped")
    mismatches = []
    stream: MiniStream

    def compare(point: str) -> None:
        identity, counts = stream.coordinator.identity(), stream.coordinator.counts()
        left, right = msgspec.structs.asdict(identity), msgspec.structs.asdict(counts)
        mismatches.extend((point, name) for name in names if left[name] != right[name] or not identity.holds)

    stream = MiniStream(tmp_path, compare, in_memory=True)
    try:
        asyncio.run(stream.run())
    finally:
        stream.close()
    assert mismatches == []


def test_a_commit_that_skips_a_group_is_found_by_the_audit(tmp_path: Path) -> None:
    run(tmp_path)
    path = tmp_path / "rollout" / f"queue_state_{ROLLOUTS - 1}.json"
    state = msgspec.json.decode(path.read_bytes())
    state["next_group_index"] += 1
    path.write_bytes(msgspec.json.encode(state))
    (skipped,) = audit_run(tmp_path).lost
    assert "1 of" in skipped
    assert "neither logged as trained nor unfinished, 0 were dropped" in skipped
