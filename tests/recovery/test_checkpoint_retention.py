"""Commits that nothing keeps are removed, record first; what somebody needs stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from recovery.branch import Branch, append_branch
from recovery.checkpoint_retention import Keeping, remove_commits
from recovery.commit import (
    CommitParent,
    QueueState,
    commit_path,
    committed_rollouts,
    iteration_directory,
    queue_state_path,
    read_commit,
)
from recovery.commit_lock import reading_commit, removing_commit
from recovery.retention import releasable
from storage.positions import PositionRanges
from tests.recovery.commits import commit
from vime.errors import CommitError


def state(rollout: int) -> QueueState:
    """Of a run with four groups a batch."""
    trained = 4 * (rollout + 1)
    return QueueState([(0, trained - 1)], trained, {}, accepted=[(0, trained + 3)])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    append_branch(tmp_path, Branch("a", None, ".", 0))
    for rollout in range(6):
        commit(tmp_path, rollout, state(rollout))
    return tmp_path


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("iter_")) for path in folder.glob("iter_*"))


def test_all_are_kept_unless_a_number_is_given(run: Path) -> None:
    assert remove_commits(run, Keeping()) == []
    assert committed_rollouts(run) == checkpoints(run) == list(range(6))


def test_the_newest_and_every_so_many_are_kept_and_are_whole(run: Path) -> None:
    assert [path.name for path in remove_commits(run, Keeping(2, every=3))] == [
        f"committed_{rollout}.json" for rollout in (0, 1, 3)
    ]
    assert committed_rollouts(run) == checkpoints(run) == [2, 4, 5]
    for rollout in (2, 4, 5):
        read_commit(commit_path(run, rollout))
    assert all(queue_state_path(run, rollout).exists() for rollout in range(6)), "branches are counted from them"


def test_a_branch_keeps_the_commit_it_began_at_until_it_has_one_of_its_own(run: Path) -> None:
    append_branch(run, Branch("b", CommitParent("a", 1), "branches/b", 3))
    remove_commits(run, Keeping(1))
    assert committed_rollouts(run) == [1, 5]
    commit(run / "branches" / "b", 2, state(2))
    remove_commits(run, Keeping(1))
    assert committed_rollouts(run) == [5]
    assert committed_rollouts(run / "branches" / "b") == [2]


def test_a_commit_that_is_read_stays_until_it_is_not(run: Path) -> None:
    with reading_commit(commit_path(run, 1)), reading_commit(commit_path(run, 1)):
        remove_commits(run, Keeping(1))
        read_commit(commit_path(run, 1))
        assert committed_rollouts(run) == [1, 5]
    remove_commits(run, Keeping(1))
    assert committed_rollouts(run) == checkpoints(run) == [5]
    with pytest.raises(CommitError, match="the commit was removed"), reading_commit(commit_path(run, 1)):
        pass


def test_a_reader_does_not_wait_for_ever_for_a_process_that_removes_the_commit(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recovery.commit_lock.WAIT_S", 0.1)
    record = commit_path(run, 1)
    with (
        removing_commit(record),
        pytest.raises(CommitError, match=r"committed_1\.json: another process has kept it locked for 0\.1 s"),
        reading_commit(record),
    ):
        pass
    with reading_commit(record):
        pass


@pytest.mark.parametrize("step", ["record.unlink", "rmtree"])
def test_a_kill_while_removing_leaves_no_record_without_its_files(run: Path, step: str) -> None:
    script = f"""
import os, pathlib, shutil, signal, sys
import recovery.checkpoint_retention as retention
kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
unlink, rmtree, done = pathlib.Path.unlink, shutil.rmtree, []
def second(act):
    def call(path, *args, **options):
        if done:
            kill()
        done.append(path)
        act(path, *args, **options)
    return call
if {step!r} == "rmtree":
    retention.shutil.rmtree = second(rmtree)
else:
    pathlib.Path.unlink = second(unlink)
retention.remove_commits(pathlib.Path({str(run)!r}), retention.Keeping(1))
"""
    process = subprocess.run([sys.executable, "-c", script], env={**os.environ}, check=False)
    assert process.returncode == -signal.SIGKILL
    assert len(set(checkpoints(run)) - set(committed_rollouts(run))) > 0, "the kill came in the middle"
    for rollout in committed_rollouts(run):
        read_commit(commit_path(run, rollout))
    remove_commits(run, Keeping(1))
    assert committed_rollouts(run) == checkpoints(run) == [5]


def test_a_checkpoint_that_is_being_written_is_left_alone(run: Path) -> None:
    iteration_directory(run, 6).mkdir()
    queue_state_path(run, 6).write_bytes(msgspec.json.encode(QueueState([], 0, {})))
    remove_commits(run, Keeping(1))
    assert checkpoints(run) == [5, 6]


def test_the_queue_keeps_samples_for_no_more_commits_than_there_are(run: Path) -> None:
    assert releasable(run, ".", 3) == PositionRanges([(0, 15)])
    remove_commits(run, Keeping(2))
    assert releasable(run, ".", 3) == PositionRanges([(0, 19)])


def test_a_session_with_another_save_removes_its_own_commits_and_those_of_the_run_stay(run: Path) -> None:
    apart = run.parent / f"{run.name}_apart"
    append_branch(run, Branch("b", CommitParent("a", 5), str(apart), 3))
    for rollout in (6, 7, 8):
        commit(apart, rollout, state(rollout))
    remove_commits(run, Keeping(1), str(apart))
    assert (committed_rollouts(apart), committed_rollouts(run)) == ([8], list(range(6)))
    remove_commits(run, Keeping(1))
    assert (committed_rollouts(apart), committed_rollouts(run)) == ([8], [5])
