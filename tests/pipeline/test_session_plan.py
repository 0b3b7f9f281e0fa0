"""What --load names: a run to go on with, or weights that a new run starts with."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.run_folder import RunFolder
from pipeline.session_plan import plan_session, start_source
from recovery.branch import Branch, append_branch
from recovery.home import live_at
from recovery.restore import RestoreMode
from vime.errors import RestoreError, SettingsError
from vime.settings.groups import Settings
from vime.settings.parse import parse_settings


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def settings(run: Path, *words: object) -> Settings:
    return parse_settings(["--save", str(run), "--num-rollout", "4", *map(str, words)])


def hugging_face(folder: Path) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").touch()
    return folder


def megatron(folder: Path, tracker: str = "3") -> Path:
    (folder / "iter_0000003").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(tracker)
    return folder


@pytest.mark.parametrize("make", [hugging_face, megatron])
def test_a_folder_of_weights_begins_a_run(run: Path, tmp_path: Path, make: object) -> None:
    weights = make(tmp_path / "weights")  # type: ignore[operator]
    given = settings(run, "--load", weights)
    plan, source = plan_session(given, new_branch="n"), start_source(given)
    assert (plan.mode, plan.start_rollout) == (RestoreMode.NEW, 0)
    assert plan.words[-1].startswith(f"The actor starts with the weights of --load {weights};")
    assert source is not None
    assert (source.flag, source.directory) == ("--load", weights)


def test_one_rank_folders_checkpoint_begins_a_run_too(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "weights" / "release"
    (folder / "mp_rank_00").mkdir(parents=True)
    (folder / "mp_rank_00" / "model_optim_rng.pt").touch()
    assert start_source(settings(run, "--load", folder)) is not None


def test_weights_leave_a_run_that_has_begun_to_its_own_commits(run: Path, tmp_path: Path) -> None:
    weights = hugging_face(tmp_path / "weights")
    (run / "rollout").mkdir(parents=True)
    (run / "rollout" / "committed_1.json").touch()
    plan = plan_session(settings(run, "--load", weights), new_branch="n")
    assert (plan.mode, plan.commit_rollout) == (RestoreMode.RESUME, 1)


def test_a_step_chooses_among_the_iterations_of_the_weights(run: Path, tmp_path: Path) -> None:
    weights = megatron(tmp_path / "weights", tracker="release")
    given = settings(run, "--load", weights, "--ckpt-step", "3")
    assert plan_session(given, new_branch="n").mode is RestoreMode.NEW
    source = start_source(given)
    assert source is not None
    assert source.megatron_folder() == weights / "iter_0000003"


def test_an_iteration_that_is_not_there_is_said_before_anything_starts(run: Path, tmp_path: Path) -> None:
    weights = megatron(tmp_path / "weights")
    with pytest.raises(RestoreError, match=r"iter_0000009 doesn't exist, found: iter_0000003"):
        plan_session(settings(run, "--load", weights, "--ckpt-step", "9"), new_branch="n")
    with pytest.raises(SettingsError, match="allowed: no iteration"):
        plan_session(settings(run, "--load", hugging_face(tmp_path / "hf"), "--ckpt-step", "9"), new_branch="n")


def test_the_own_folder_is_a_run_and_never_weights(run: Path) -> None:
    megatron(run)
    assert start_source(settings(run, "--load", run)) is None
    assert start_source(settings(run, "--load", run / "rollout" / "committed_3.json")) is None


def test_another_run_goes_on_where_it_is_and_only_its_commits_go_to_save(run: Path, tmp_path: Path) -> None:
    other = megatron(tmp_path / "other")
    (other / "rollout").mkdir()
    (other / "rollout" / "committed_2.json").touch()
    given = settings(run, "--load", other)
    assert start_source(given) is None
    plan, folder = plan_session(given, new_branch="n"), RunFolder.of(given)
    assert (plan.commit_directory, plan.commit_rollout, plan.directory) == (".", 2, str(run))
    assert (folder.root, folder.queue) == (other, other / "rollout_data" / "pool")
    live_at(folder.root, run)
    assert RunFolder.of(settings(run)) == folder, "the next start needs no --load"
    append_branch(other, Branch("a", None, str(run), 0))
    (run / "rollout" / "committed_3.json").touch()
    assert plan_session(settings(run, "--num-rollout", 9), new_branch="n").commit_rollout == 3
    again = plan_session(settings(run, "--load", other, "--num-rollout", 9), new_branch="n")
    assert (again.commit_rollout, again.directory) == (3, str(run)), "the same command goes on, too"
    assert plan_session(settings(other), new_branch="n").commit_rollout == 2


def test_a_save_with_a_run_of_its_own_does_not_take_over_another(run: Path, tmp_path: Path) -> None:
    other = megatron(tmp_path / "other")
    (other / "rollout").mkdir()
    (other / "rollout" / "committed_2.json").touch()
    append_branch(run, Branch("a", None, ".", 0))
    with pytest.raises(RestoreError, match=r"is of the run in .*/other, and --save .*/run holds the run in"):
        RunFolder.of(settings(run, "--load", other))


@pytest.mark.parametrize("flag", ["--finetune", "--no-load-optim", "--no-load-rng"])
def test_a_commit_is_taken_whole_or_not_at_all(run: Path, flag: str) -> None:
    assert plan_session(settings(run, flag), new_branch="n").mode is RestoreMode.NEW
    (run / "rollout").mkdir(parents=True)
    (run / "rollout" / "committed_1.json").touch()
    with pytest.raises(RestoreError, match=f"{flag} with a commit to go on from"):
        plan_session(settings(run, flag), new_branch="n")


def test_a_folder_that_holds_nothing_leaves_the_start_to_the_reference(run: Path, tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    with pytest.raises(RestoreError, match="absent doesn't exist"):
        plan_session(settings(run, "--load", absent), new_branch="n")
    plan = plan_session(settings(run, "--load", absent, "--ref-load", tmp_path), new_branch="n")
    assert plan.words[-1] == f"--load {absent} holds no checkpoint: the actor starts as --ref-load {tmp_path}."


@pytest.mark.parametrize(("has_commit", "start"), [(False, 0), (True, 2)])
def test_a_run_starts_where_its_commit_says_and_a_flag_that_says_otherwise_is_refused(
    run: Path, has_commit: bool, start: int
) -> None:
    if has_commit:
        (run / "rollout").mkdir(parents=True)
        (run / "rollout" / "committed_1.json").touch()
    given = settings(run, "--start-rollout-id", start)
    assert plan_session(given, new_branch="n").start_rollout == start
    with pytest.raises(RestoreError, match=rf"--start-rollout-id is 1\. .* at rollout {start}\."):
        plan_session(settings(run, "--start-rollout-id", 1), new_branch="n")
