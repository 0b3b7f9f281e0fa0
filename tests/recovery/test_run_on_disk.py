"""What a run folder is found to hold."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from recovery.branch import Branch, append_branch
from recovery.commit import CommitParent
from recovery.home import home_of, live_at, run_of
from recovery.pointer import point_to, pointer_path, read_tracker
from recovery.restore import plan_restore
from recovery.run_on_disk import commit_folders, folder_name, scan_run
from vime.errors import RestoreError


def committed(folder: Path, rollout: int) -> None:
    (folder / "rollout").mkdir(parents=True, exist_ok=True)
    (folder / "rollout" / f"committed_{rollout}.json").touch()
    (folder / f"iter_{rollout:07d}").mkdir()


def test_only_what_has_a_record_is_a_commit_and_the_rest_is_named(tmp_path: Path) -> None:
    committed(tmp_path, 10)
    (tmp_path / "iter_0000020").mkdir()
    (tmp_path / "iter_0000030").mkdir()
    (tmp_path / "99").touch()
    committed(tmp_path / "branches" / "b", 12)
    (tmp_path / "branches" / "b" / "iter_0000014").mkdir()
    disk = scan_run(tmp_path, tmp_path / "pool")
    assert disk.commits == {".": [10], "branches/b": [12]}
    assert list(disk.unfinished) == ["99", "iter_0000020", "iter_0000030", "branches/b/iter_0000014"]
    plan = plan_restore(disk, load=None, save=str(tmp_path), ckpt_step=None, num_rollout=99, new_branch="n")
    assert plan.commit_rollout == 10
    assert "99, iter_0000020, iter_0000030" in plan.words[-1]


def test_a_folder_elsewhere_that_a_session_wrote_to_belongs_to_the_run(tmp_path: Path) -> None:
    run, apart = tmp_path / "run", tmp_path / "apart"
    append_branch(run, Branch("a", None, ".", 0))
    append_branch(run, Branch("b", None, str(apart), 0))
    committed(apart, 3)
    assert commit_folders(run) == [".", str(apart)]
    assert scan_run(run, run / "pool").commits == {str(apart): [3]}
    assert (folder_name(run, run), folder_name(run / "branches" / "x", run)) == (".", "branches/x")


def test_a_folder_for_checkpoints_within_the_run_folder_is_known_as_one_elsewhere_is(tmp_path: Path) -> None:
    append_branch(tmp_path, Branch("a", None, ".", 0))
    append_branch(tmp_path, Branch("b", None, "within", 0))
    committed(tmp_path / "within", 3)
    disk = scan_run(tmp_path, tmp_path / "pool", "within")
    assert disk.commits == {"within": [3]}
    plan = plan_restore(
        disk, load=None, save=str(tmp_path), ckpt_step=None, num_rollout=9, new_branch="n", output="within"
    )
    assert (plan.commit_rollout, plan.directory) == (3, "within")


def test_a_tracker_is_edited_when_it_is_neither_what_was_written_nor_the_newest(tmp_path: Path) -> None:
    point_to(tmp_path, ".", 9)
    assert read_tracker(tmp_path).edited_to(9) is None
    assert read_tracker(tmp_path).edited_to(14) is None, "killed before the tracker was written"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("14\n")
    assert read_tracker(tmp_path).edited_to(14) is None, "killed before the pointer was written"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4\n")
    assert read_tracker(tmp_path).edited_to(9) == "4"


def test_a_damaged_pointer_is_refused_with_the_way_out(tmp_path: Path) -> None:
    point_to(tmp_path, ".", 9)
    pointer_path(tmp_path).write_text("{")
    with pytest.raises(RestoreError, match=r"current\.json: damaged") as caught:
        read_tracker(tmp_path)
    assert "Remove the file" in caught.value.next_step


def test_the_run_of_a_folder_is_found_from_its_branches_and_from_elsewhere(tmp_path: Path) -> None:
    run, apart = tmp_path / "run", tmp_path / "apart"
    live_at(run, apart)
    assert home_of(apart) == home_of(apart / "branches" / "x") == run
    assert home_of(run / "branches" / "x") == home_of(run) == run
    run.mkdir(exist_ok=True)
    assert run_of(apart, None) == run
    committed(run, 1)
    assert run_of(tmp_path / "new", run / "branches" / "nope") == tmp_path / "new", "nothing to go on from"
    assert run_of(tmp_path / "new", run) == run


def run_with_checkpoints_apart(folder: Path) -> tuple[Path, Path]:
    """A run whose second branch commits to a folder of its own; both."""
    run, apart = folder / "run", folder / "apart"
    append_branch(run, Branch("a", None, ".", 0))
    append_branch(run, Branch("b", CommitParent("a", 1), str(apart), 0))
    committed(run, 1)
    committed(apart, 3)
    live_at(run, apart)
    return run, apart


def test_a_run_that_was_moved_away_from_its_checkpoints_is_not_begun_anew_and_found_by_its_new_place(
    tmp_path: Path,
) -> None:
    run, apart = run_with_checkpoints_apart(tmp_path)
    moved = run.rename(tmp_path / "moved")
    with pytest.raises(RestoreError, match=r"--save .*/apart holds commits of the run in .*/run, which is not there"):
        run_of(apart, None)
    assert run_of(apart, moved) == moved
    live_at(moved, apart)
    assert run_of(apart, None) == moved


def test_a_copy_of_a_run_does_not_take_the_checkpoints_along_while_the_run_is_there(tmp_path: Path) -> None:
    run, apart = run_with_checkpoints_apart(tmp_path)
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    with pytest.raises(RestoreError, match=r"is of the run in .*/copy, and --save .*/apart holds the run in .*/run"):
        run_of(apart, copy)


def test_a_moved_folder_of_checkpoints_is_refused_instead_of_training_its_rollouts_again(tmp_path: Path) -> None:
    run, apart = tmp_path / "run", tmp_path / "apart"
    append_branch(run, Branch("a", None, str(apart), 0))
    committed(apart, 3)
    assert scan_run(run, run / "pool", str(apart)).commits == {str(apart): [3]}
    moved = str(apart.rename(tmp_path / "moved"))
    with pytest.raises(RestoreError, match=r"/moved holds commits \(rollout 3 is the newest\) .* it knows .*/apart\."):
        scan_run(run, run / "pool", moved)
