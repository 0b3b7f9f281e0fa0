"""A trainer that was lost goes on from the newest commit, on a branch of its own."""

from pathlib import Path

import pytest

from pipeline.run_folder import RunFolder
from pipeline.session_start import Start
from pipeline.trainer_return import go_back
from recovery.branch import Branch, ancestry, append_branch, read_branches
from recovery.commit import QueueState
from recovery.restore import RestoreMode, RestorePlan
from tests.recovery.commits import commit

STATE = QueueState(trained=[(0, 15)], next_group_index=24, identity={"generated": 24})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run whose session, branch `first`, has begun."""
    folder = RunFolder(tmp_path, tmp_path / "pool")
    folder.make()
    folder.settings_of("first").write_bytes(b"settings")
    append_branch(tmp_path, Branch("first", None, ".", 0))
    return folder


def started() -> Start:
    return Start(RestorePlan(RestoreMode.NEW, ".", 0), "first", None, None, None)


def test_rollouts_after_the_commit_are_left_behind_and_the_session_goes_on_after_it(folder: RunFolder) -> None:
    commit(folder.root, 1, STATE, branch="first")
    start = go_back(started(), folder, (folder.root, 1), version=7)
    assert (start.plan.start_rollout, start.plan.directory) == (2, ".")
    assert start.state == STATE
    branches = read_branches(folder.root)
    assert ancestry(branches, start.branch) == [("first", 1), (start.branch, None)]
    assert branches[-1].start_version == 7, "versions never go back"
    assert folder.settings_of(start.branch).read_bytes() == b"settings"


def test_without_a_commit_all_is_trained_anew(folder: RunFolder) -> None:
    start = go_back(started(), folder, None, version=3)
    assert (start.plan.start_rollout, start.parent, start.state) == (0, None, None)
    assert ancestry(read_branches(folder.root), start.branch) == [(start.branch, None)]


def test_a_trainer_may_be_lost_twice(folder: RunFolder) -> None:
    commit(folder.root, 1, STATE, branch="first")
    once = go_back(started(), folder, (folder.root, 1), version=7)
    twice = go_back(once, folder, (folder.root, 1), version=9)
    assert twice.branch != once.branch
    assert ancestry(read_branches(folder.root), twice.branch) == [("first", 1), (twice.branch, None)]
