"""The restore plan: each situation on disk leads to one plan, in words."""

from pathlib import Path

import pytest

from recovery.branch import Branch, ancestry, append_branch, branches_path, read_branches
from recovery.commit import CommitParent
from recovery.restore import RestoreMode, RestorePlan, parse_load, plan_restore
from recovery.run_on_disk import RunOnDisk
from vime.errors import RestoreError

ROOT = Branch("a", None, ".", 0)
FORK = Branch("b", CommitParent("a", 9), "branches/b", 12)


def restore(
    disk: RunOnDisk, *, load: str | None = None, ckpt_step: int | None = None, num_rollout: int = 40
) -> RestorePlan:
    return plan_restore(disk, load=load, save="/run", ckpt_step=ckpt_step, num_rollout=num_rollout, new_branch="n")


EMPTY = RunOnDisk(has_queue=False, branches=[], commits={})
COMMITTED = RunOnDisk(has_queue=True, branches=[ROOT], commits={".": [9, 19, 29]})


@pytest.mark.parametrize("load", [None, "/run"])
def test_empty_folder_starts_a_new_run(load: str | None) -> None:
    plan = restore(EMPTY, load=load)
    assert (plan.mode, plan.directory, plan.start_rollout) == (RestoreMode.NEW, ".", 0)


def test_run_that_died_before_its_first_commit_keeps_its_accepted_groups() -> None:
    plan = restore(RunOnDisk(has_queue=True, branches=[ROOT], commits={}))
    assert (plan.mode, plan.start_rollout) == (RestoreMode.RESTART, 0)
    assert "accepted groups are kept" in plan.words[0]


def test_run_whose_queue_ended_before_its_first_commit_says_that_it_starts_anew() -> None:
    plan = restore(RunOnDisk(has_queue=False, branches=[ROOT], commits={}))
    assert (plan.mode, plan.start_rollout) == (RestoreMode.NEW, 0)
    assert "its groups are gone: it starts anew" in plan.words[0]


@pytest.mark.parametrize("load", [None, "/run"])
def test_newest_commit_is_resumed_in_place(load: str | None) -> None:
    plan = restore(COMMITTED, load=load)
    assert (plan.mode, plan.directory, plan.commit_rollout, plan.start_rollout) == (RestoreMode.RESUME, ".", 29, 30)
    assert "newest" in plan.words[0]


def test_older_commit_opens_a_folder_of_its_own_and_leaves_the_later_ones() -> None:
    plan = restore(COMMITTED, ckpt_step=9)
    assert (plan.commit_rollout, plan.start_rollout, plan.directory) == (9, 10, "branches/n")
    assert "19, 29 stay" in plan.words[1]


def test_exact_commit_file_is_taken() -> None:
    plan = restore(COMMITTED, load="/run/rollout/committed_19.json")
    assert plan.commit_rollout == 19


def test_newest_branch_is_active() -> None:
    disk = RunOnDisk(has_queue=True, branches=[ROOT, FORK], commits={".": [9, 19], "branches/b": [14]})
    plan = restore(disk)
    assert (plan.commit_directory, plan.commit_rollout, plan.directory) == ("branches/b", 14, "branches/b")


def test_step_that_only_an_ancestor_has_is_found_there() -> None:
    disk = RunOnDisk(has_queue=True, branches=[ROOT, FORK], commits={".": [9, 19], "branches/b": [14]})
    plan = restore(disk, ckpt_step=9)
    assert (plan.commit_directory, plan.commit_rollout) == (".", 9)


def test_flag_and_file_that_disagree_are_refused_with_both_numbers() -> None:
    with pytest.raises(RestoreError, match=r"rollout 19, --ckpt-step is 9"):
        restore(COMMITTED, load="/run/rollout/committed_19.json", ckpt_step=9)


def test_missing_commit_is_refused_with_those_that_exist() -> None:
    with pytest.raises(RestoreError, match=r"no commit of rollout 11; there are 9, 19, 29"):
        restore(COMMITTED, ckpt_step=11)
    with pytest.raises(RestoreError, match="no commit of rollout 11; there is none"):
        restore(EMPTY, ckpt_step=11)


def test_older_commit_of_a_run_without_commits_is_refused_with_the_way_out() -> None:
    with pytest.raises(RestoreError, match="no commit of rollout 4; there is none at all") as caught:
        restore(EMPTY, ckpt_step=4)
    assert "leave out --ckpt-step" in caught.value.next_step


def test_resume_at_the_end_says_so_and_past_it_names_both_numbers() -> None:
    plan = restore(COMMITTED, num_rollout=30)
    assert plan.mode is RestoreMode.COMPLETE
    assert plan.words == ["Nothing to do: already at 30 of 30."]
    with pytest.raises(RestoreError, match="30 rollouts in, past --num-rollout 5"):
        restore(COMMITTED, num_rollout=5)


def test_load_outside_save_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RestoreError, match="lies outside --save"):
        restore(COMMITTED, load=str(tmp_path))


@pytest.mark.parametrize(
    ("load", "words"),
    [
        ("/elsewhere", "--load /elsewhere doesn't exist"),
        ("/elsewhere/rollout/committed_9.json", "--load /elsewhere doesn't exist"),
        ("/run/branches/nope", "--load /run/branches/nope doesn't exist or holds no commit"),
    ],
)
def test_load_that_is_not_there_is_refused_as_that(load: str, words: str) -> None:
    with pytest.raises(RestoreError, match=words) as caught:
        restore(COMMITTED, load=load)
    assert caught.value.next_step.startswith("Check --load")


def test_load_of_another_json_file_is_refused() -> None:
    with pytest.raises(RestoreError, match="allowed are a run folder"):
        parse_load("/run/rollout/queue_state_3.json")


def test_branches_survive_a_torn_last_line(tmp_path: Path) -> None:
    append_branch(tmp_path, ROOT)
    append_branch(tmp_path, FORK)
    with branches_path(tmp_path).open("ab") as file:
        file.write(b'{"branch":"c","par')
    assert read_branches(tmp_path) == [ROOT, FORK]
    append_branch(tmp_path, Branch("d", None, ".", 3))
    assert [branch.branch for branch in read_branches(tmp_path)] == ["a", "b", "d"]


def test_damage_before_the_last_line_is_refused(tmp_path: Path) -> None:
    append_branch(tmp_path, ROOT)
    branches_path(tmp_path).write_bytes(b"garbage\n" + branches_path(tmp_path).read_bytes() * 2)
    with pytest.raises(RestoreError, match=r"branches\.jsonl:1: damaged"):
        read_branches(tmp_path)


def test_ancestry_counts_each_branch_up_to_its_fork() -> None:
    tip = Branch("c", CommitParent("b", 14), "branches/c", 20)
    assert ancestry([ROOT, FORK, tip], "c") == [("a", 9), ("b", 14), ("c", None)]
