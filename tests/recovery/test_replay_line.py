"""A replay starts at the newest whole commit before its rollout, along the sessions that lead to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from recovery.commit import committed_rollouts
from recovery.replay_line import TrainedRollout, replay_line
from vime.errors import NoRunError

FIRST = frozenset(TrainedRollout("a", number) for number in range(8))
RESUMED = FIRST | {TrainedRollout("b", number) for number in range(6, 10)}
CHAIN = [("a", 5), ("b", None)]


def numbers(chain: list[tuple[str, int | None]], commits: dict[str, list[int]], rollout_id: int) -> tuple[object, ...]:
    line = replay_line(chain, commits, RESUMED, rollout_id)
    start = None if line.commit is None else (line.commit.branch, line.commit.rollout_id)
    return start, [(item.branch, item.rollout_id) for item in line.rollouts]


def test_the_newest_commit_before_the_rollout_is_the_start() -> None:
    assert numbers([("a", None)], {"a": [1, 3, 5]}, 5) == (("a", 3), [("a", 4), ("a", 5)])


def test_the_first_rollout_starts_from_the_first_weights() -> None:
    assert numbers([("a", None)], {"a": [1]}, 1) == (None, [("a", 0), ("a", 1)])


def test_a_rollout_after_a_resume_is_that_of_the_new_session() -> None:
    assert numbers(CHAIN, {"a": [3, 5, 7], "b": [7]}, 7) == (("a", 5), [("b", 6), ("b", 7)])


def test_rolled_back_rollouts_are_replayed_along_their_own_session() -> None:
    assert numbers([("a", None)], {"a": [3, 5]}, 7) == (("a", 5), [("a", 6), ("a", 7)])


def test_a_removed_commit_lengthens_the_replay() -> None:
    assert numbers(CHAIN, {"a": [1], "b": []}, 6) == (("a", 1), [*[("a", n) for n in range(2, 6)], ("b", 6)])


def test_a_rollout_that_was_not_trained_is_refused_with_the_range() -> None:
    with pytest.raises(NoRunError, match="Rollout 12 was not trained along this line of sessions; it trained 0 to 9"):
        numbers(CHAIN, {}, 12)


def test_a_gap_in_the_record_is_refused() -> None:
    with pytest.raises(NoRunError, match="Rollout 3 follows on rollout 0, of which there is no record"):
        replay_line([("a", None)], {}, frozenset({TrainedRollout("a", 3)}), 3)


def test_folders_without_a_commit_record_are_no_start(tmp_path: Path) -> None:
    for name in ("iter_0000002", "iter_0000004", "99"):
        (tmp_path / name).mkdir()
    (tmp_path / "rollout").mkdir()
    (tmp_path / "rollout" / "committed_1.json").write_text("{}")
    (tmp_path / "rollout" / "committed_x.json").write_text("{}")
    line = replay_line([("a", None)], {"a": committed_rollouts(tmp_path)}, FIRST, 6)
    assert line.commit == TrainedRollout("a", 1)
