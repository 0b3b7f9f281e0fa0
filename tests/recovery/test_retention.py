"""Which results no kept commit needs."""

from __future__ import annotations

from pathlib import Path

import msgspec

from recovery.commit import QueueState, commit_path, queue_state_path
from recovery.retention import last_releasable_rollout, releasable
from storage.positions import SEGMENT_SPAN, PositionRanges


def commit(folder: Path, rollout_id: int, trained: int, accepted: int) -> None:
    """A commit of the first `trained` of `accepted` positions."""
    (folder / "rollout").mkdir(parents=True, exist_ok=True)
    state = QueueState([(0, trained - 1)], accepted, {}, accepted=[(0, accepted - 1)])
    queue_state_path(folder, rollout_id).write_bytes(msgspec.json.encode(state))
    commit_path(folder, rollout_id).write_bytes(b"{}")


def test_nothing_is_released_before_there_is_a_commit(tmp_path: Path) -> None:
    assert releasable(tmp_path, ".", 2) == PositionRanges()
    assert last_releasable_rollout(tmp_path, ".", 2) is None


def test_the_oldest_kept_commit_decides(tmp_path: Path) -> None:
    for rollout in range(4):
        commit(tmp_path, rollout, trained=4 * (rollout + 1), accepted=40)
    assert releasable(tmp_path, ".", 1) == PositionRanges([(0, 15)])
    assert releasable(tmp_path, ".", 2) == PositionRanges([(0, 11)])
    assert releasable(tmp_path, ".", 9) == PositionRanges([(0, 3)])
    assert [last_releasable_rollout(tmp_path, ".", kept) for kept in (1, 2, 9)] == [3, 2, 0]


def test_other_branches_keep_what_waited_at_their_commits_and_no_more(tmp_path: Path) -> None:
    commit(tmp_path, 5, trained=8, accepted=10)
    branch = tmp_path / "branches" / "b"
    commit(branch, 6, trained=20, accepted=25)
    assert releasable(tmp_path, "branches/b", 1) == PositionRanges([(0, 7), (10, 19)])
    (tmp_path / "branches" / "empty").mkdir()
    assert releasable(tmp_path, "branches/b", 1) == PositionRanges([(0, 7), (10, 19)])


def test_a_commit_that_cannot_be_read_cannot_be_chosen_and_keeps_nothing(tmp_path: Path) -> None:
    for rollout in range(3):
        commit(tmp_path, rollout, trained=4 * (rollout + 1), accepted=SEGMENT_SPAN)
    queue_state_path(tmp_path, 2).write_bytes(b"{")
    assert releasable(tmp_path, ".", 2) == PositionRanges([(0, 3)])
