"""`vime runs`: sessions with their commits, and what keeps each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recovery.branch import Branch, append_branch
from recovery.commit import (
    CommitParent,
    QueueState,
    commit_path,
    iteration_directory,
    write_commit,
)
from recovery.commit_lock import reading_commit
from recovery.home import live_at
from recovery.pointer import point_to
from vime.cli.main import main


def commit(run: Path, folder: str, branch: str, rollout: int) -> None:
    checkpoint = iteration_directory(run / folder, rollout)
    checkpoint.mkdir(parents=True)
    (checkpoint / "model").write_bytes(bytes(1000))
    write_commit(
        run / folder,
        rollout_id=rollout,
        branch=branch,
        parent=None,
        weight_version=rollout + 1,
        run_id="r",
        rollout_data_dir="",
        queue_state=QueueState([], 0, {}),
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Session a has three commits; b began at its second one in another folder and has none yet."""
    run = tmp_path / "run"
    append_branch(run, Branch("a", None, ".", 0))
    for rollout in (4, 9, 14):
        commit(run, ".", "a", rollout)
    point_to(run, ".", 14)
    append_branch(run, Branch("b", CommitParent("a", 9), "branches/b", 9))
    (run / "iter_0000019").mkdir()
    (run / "settings.json").write_text(json.dumps({"checkpoint": {"keep_checkpoints": 1, "keep_every": 15}}))
    return run


def listed(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main(["runs", *map(str, words), "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_every_commit_has_its_session_size_and_what_keeps_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with reading_commit(commit_path(run, 4)):
        report = listed(capsys, run)
    first, second = report["sessions"]
    assert (second["branch"], second["parent_branch"], second["parent_rollout"]) == ("b", "a", 9)
    assert [(c["rollout_id"], c["num_bytes"], c["weight_version"]) for c in first["commits"]] == [
        (4, 1000, 5),
        (9, 1000, 10),
        (14, 1000, 15),
    ]
    assert [c["held_by"] for c in first["commits"]] == [
        ["reader"],
        ["branch b"],
        ["tracker", "one of the newest 1"],
    ]
    assert report["unfinished"] == ["iter_0000019"]


def test_the_table_says_which_commit_nothing_keeps(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("4" in line.split() and "nothing: the next commit removes it" in line for line in lines)
    assert "iter_0000019: no commit record, so it is never chosen" in lines


def test_damage_is_named_by_size_and_with_verify_by_digest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (iteration_directory(run, 4) / "model").write_bytes(b"short")
    (iteration_directory(run, 9) / "model").write_bytes(bytes(999) + b"x")
    problems = [commit["problem"] for commit in listed(capsys, run)["sessions"][0]["commits"]]
    assert problems == ["iter_0000004/model has 5 bytes, expected 1000", None, None]
    problems = [commit["problem"] for commit in listed(capsys, run, "--verify")["sessions"][0]["commits"]]
    assert "SHA-256" in problems[1]
    assert problems[2] is None


def test_a_folder_that_holds_only_checkpoints_stands_for_its_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    apart = tmp_path / "apart"
    live_at(run, apart)
    append_branch(run, Branch("c", CommitParent("a", 14), str(apart), 15))
    commit(run, str(apart), "c", 19)
    report = listed(capsys, apart)
    assert report["run"] == str(run)
    assert [(c["rollout_id"], c["directory"]) for c in report["sessions"][2]["commits"]] == [(19, str(apart))]
    assert report["sessions"][2]["commits"][0]["held_by"] == ["tracker", "one of the newest 1"]
    assert [c["held_by"] for c in report["sessions"][0]["commits"]] == [
        ["another --save"],
        ["another --save", "branch b"],
        ["tracker", "another --save"],
    ], "the session that commits apart removes nothing of the run's"
