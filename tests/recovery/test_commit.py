"""A commit is whole or absent; a damaged one is refused naming the file."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recovery.commit import (
    TRACKER,
    QueueState,
    commit_path,
    committed_rollouts,
    iteration_directory,
    read_commit,
    read_queue_state,
)
from tests.recovery.commits import WEIGHT_VERSION, checkpoint, commit, seal
from vime.errors import CommitError

STATE = QueueState(trained=[(0, 3)], next_group_index=8, identity={"generated": 8})


def test_commit_reads_back_with_its_queue_state(tmp_path: Path) -> None:
    record = read_commit(commit(tmp_path, 9, STATE))
    assert (record.rollout_id, record.branch, record.weight_version) == (9, "a", WEIGHT_VERSION)
    assert read_queue_state(tmp_path, 9) == STATE
    assert committed_rollouts(tmp_path) == [9]
    assert (tmp_path / TRACKER).read_text() == "9"


def test_commit_is_never_replaced(tmp_path: Path) -> None:
    path = commit(tmp_path, 9, STATE)
    before = path.read_bytes()
    with pytest.raises(CommitError, match="exists already"):
        seal(tmp_path, 9, STATE)
    assert path.read_bytes() == before


def test_checkpoint_without_files_is_not_committed(tmp_path: Path) -> None:
    iteration_directory(tmp_path, 2).mkdir()
    with pytest.raises(CommitError, match="has no file"):
        seal(tmp_path, 2, STATE)
    assert committed_rollouts(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["iter_0000009/model.distcp", "iter_0000009/metadata.json", "rollout/queue_state_9.json"]
)
@pytest.mark.parametrize("damage", ["truncate", "zero", "flip", "remove"])
def test_damage_to_any_file_is_refused_naming_it(tmp_path: Path, name: str, damage: str) -> None:
    commit(tmp_path, 4, STATE)
    path = commit(tmp_path, 9, STATE)
    victim = tmp_path / name
    content = bytearray(victim.read_bytes())
    match damage:
        case "truncate":
            victim.write_bytes(content[:-1])
        case "zero":
            victim.write_bytes(bytes(len(content)))
        case "flip":
            content[len(content) // 2] ^= 1
            victim.write_bytes(content)
        case "remove":
            victim.unlink()
    with pytest.raises(CommitError, match=Path(name).name) as caught:
        read_commit(path)
    assert caught.value.next_step == "Resume from the commit before it with --ckpt-step 4, or restore the file."


def test_damage_to_the_only_commit_says_that_there_is_no_other(tmp_path: Path) -> None:
    path = commit(tmp_path, 9, STATE)
    (tmp_path / "iter_0000009" / "model.distcp").unlink()
    with pytest.raises(CommitError, match=r"model\.distcp is missing\. There is no older commit, or restore the file"):
        read_commit(path)


def test_record_of_another_rollout_or_one_that_is_not_resumable_is_refused(tmp_path: Path) -> None:
    path = commit(tmp_path, 9, STATE)
    copied = path.with_name("committed_8.json")
    copied.write_bytes(path.read_bytes())
    with pytest.raises(CommitError, match=r"committed_8\.json: it is the record of rollout 9"):
        read_commit(copied)
    path.write_text(path.read_text().replace('"resumable": true', '"resumable": false'))
    with pytest.raises(CommitError, match="marked as not resumable"):
        read_commit(path)


def test_record_of_a_newer_version_is_refused_with_its_number(tmp_path: Path) -> None:
    path = commit(tmp_path, 9, STATE)
    path.write_text(path.read_text().replace('"version": 1', '"version": 7'))
    with pytest.raises(CommitError, match="version 7, this vime reads up to 1"):
        read_commit(path)


@pytest.mark.parametrize("step", ["write_atomically", "sync_tree", "sha256_of", "write_once"])
def test_kill_before_any_step_leaves_no_commit(tmp_path: Path, step: str) -> None:
    checkpoint(tmp_path, 5)
    script = f"""
import os, signal
from pathlib import Path
import recovery.commit as commit
def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
commit.{step} = die
state = commit.QueueState(trained=[], next_group_index=0, identity={{}})
commit.write_commit(Path({str(tmp_path)!r}), rollout_id=5, branch="b", parent=None, weight_version=1, run_id="r",
    rollout_data_dir="d", queue_state=state)
"""
    process = subprocess.run([sys.executable, "-c", script], env={**os.environ}, check=False)
    assert process.returncode == -signal.SIGKILL
    assert committed_rollouts(tmp_path) == []
    assert not commit_path(tmp_path, 5).exists()
    commit_again = seal(tmp_path, 5, STATE)
    assert read_commit(commit_again).rollout_id == 5
