"""Which commit a session goes on from, one case for each situation on disk and each way of asking."""

from __future__ import annotations

from pathlib import Path

import pytest

from recovery.branch import Branch
from recovery.commit import CommitParent
from recovery.pointer import Tracker
from recovery.restore import RestoreMode, RestorePlan, plan_restore
from recovery.run_on_disk import RunOnDisk
from vime.errors import RestoreError

OUT = "/elsewhere/out"
A = Branch("a", None, ".", 0)
B = Branch("b", CommitParent("a", 9), "branches/b", 12)
C = Branch("c", CommitParent("b", 14), "branches/c", 20)
D = Branch("d", CommitParent("a", 4), "branches/d", 30)
COMMITS = {".": [4, 9, 19], "branches/b": [14, 24], "branches/c": [29]}
"""19 was left behind at 9, and 24 at 14."""


def disk(*branches: Branch, tracker: Tracker | None = None, **changes: object) -> RunOnDisk:
    known = branches or (A, B, C)
    commits = {name: rollouts for name, rollouts in COMMITS.items() if any(b.directory == name for b in known)}
    trackers = {} if tracker is None else {".": tracker}
    return RunOnDisk(**{"has_queue": True, "branches": known, "commits": commits, "trackers": trackers, **changes})  # type: ignore[arg-type]


def restore(
    found: RunOnDisk,
    *,
    load: str | None = None,
    ckpt_step: int | None = None,
    output: str = ".",
    num_rollout: int = 99,
) -> RestorePlan:
    return plan_restore(
        found, load=load, save="/run", ckpt_step=ckpt_step, num_rollout=num_rollout, new_branch="n", output=output
    )


def chosen(plan: RestorePlan) -> tuple[str | None, int | None, str]:
    return plan.commit_directory, plan.commit_rollout, plan.directory


def test_without_load_the_newest_commit_of_the_newest_branch_is_resumed_in_place() -> None:
    assert chosen(restore(disk())) == ("branches/c", 29, "branches/c")


@pytest.mark.parametrize(("step", "source"), [(29, "branches/c"), (14, "branches/b"), (9, "."), (4, ".")])
def test_a_step_is_looked_for_on_the_newest_branch_and_then_on_its_ancestors(step: int, source: str) -> None:
    for load in (None, "/run", "/run/branches/c"):
        plan = restore(disk(), load=load, ckpt_step=step)
        assert (plan.commit_directory, plan.commit_rollout, plan.start_rollout) == (source, step, step + 1)


@pytest.mark.parametrize("step", [19, 24])
def test_a_step_past_a_fork_is_of_another_future_and_refused_with_the_file_that_reaches_it(step: int) -> None:
    with pytest.raises(RestoreError, match=f"no commit of rollout {step}; there are 4, 9, 14, 29") as caught:
        restore(disk(), ckpt_step=step)
    assert f"committed_{step}.json" in caught.value.next_step


@pytest.mark.parametrize(("folder", "step"), [("", 19), ("branches/b/", 24)])
def test_an_exact_file_reaches_a_future_that_was_left_behind(folder: str, step: int) -> None:
    plan = restore(disk(), load=f"/run/{folder}rollout/committed_{step}.json")
    assert (plan.commit_directory, plan.commit_rollout) == (folder.rstrip("/") or ".", step)


def test_a_folder_of_a_branch_stands_for_that_branch() -> None:
    plan = restore(disk(), load="/run/branches/b")
    assert chosen(plan) == ("branches/b", 24, "branches/b")


def test_an_exact_file_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(RestoreError, match="no commit of rollout 5; there are 14, 24"):
        restore(disk(), load="/run/branches/b/rollout/committed_5.json")


def test_a_session_without_a_commit_is_passed_over_and_said() -> None:
    plan = restore(disk(A, B, D))
    assert chosen(plan) == ("branches/b", 24, "branches/b")
    assert any("began at the commit of rollout 4 and ended before a commit" in words for words in plan.words)


def test_an_edited_tracker_chooses_and_says_so() -> None:
    plan = restore(disk(tracker=Tracker("9", recorded="29")))
    assert chosen(plan) == (".", 9, "branches/n")
    assert "(the tracker was edited to 9)" in plan.words[0]


@pytest.mark.parametrize("text", ["29", "24"])
def test_a_kill_between_commit_and_tracker_is_no_edit(text: str) -> None:
    """The tracker still says what was recorded, or says the newest commit before that is recorded."""
    assert restore(disk(tracker=Tracker(text, recorded="24"))).commit_rollout == 29


def test_a_tracker_without_a_record_decides_nothing() -> None:
    assert restore(disk(tracker=Tracker("9", recorded=None))).commit_rollout == 29


def test_a_tracker_of_a_save_that_was_not_finished_is_ignored_and_said() -> None:
    plan = restore(disk(tracker=Tracker("34", recorded="29")))
    assert plan.commit_rollout == 29
    assert any("The tracker names rollout 34, which has no commit; it is ignored." in words for words in plan.words)


@pytest.mark.parametrize(("text", "words"), [("release", "holds 'release', allowed: the number"), ("5", "rollout 5")])
def test_a_tracker_edited_to_what_is_no_commit_is_refused(text: str, words: str) -> None:
    with pytest.raises(RestoreError, match=words):
        restore(disk(tracker=Tracker(text, recorded="29")))


@pytest.mark.parametrize(
    ("load", "step", "flag"), [(None, 14, "--ckpt-step"), ("/run/rollout/committed_4.json", None, "--load")]
)
def test_flag_and_file_win_over_an_edited_tracker(load: str | None, step: int | None, flag: str) -> None:
    plan = restore(disk(tracker=Tracker("9", recorded="29")), load=load, ckpt_step=step)
    assert plan.commit_rollout == (4 if step is None else step)
    assert any(f"edited to 9, is ignored: {flag} decides" in words for words in plan.words)


def test_checkpoints_without_a_commit_record_are_never_chosen_and_named() -> None:
    only = RunOnDisk(True, [A], {".": [10]}, unfinished=["iter_0000020", "iter_0000030", "99"])
    plan = restore(only)
    assert plan.commit_rollout == 10
    assert plan.words[-1] == "Ignored: iter_0000020, iter_0000030, 99, which have no commit records."
    with pytest.raises(RestoreError, match="iter_0000020 is of a save that was not finished"):
        restore(only, ckpt_step=20)


def test_a_checkpoint_that_is_no_commit_is_never_taken_for_an_empty_run() -> None:
    with pytest.raises(RestoreError, match="no commit of rollout 20; there is none at all"):
        restore(RunOnDisk(True, [A], {}, unfinished=["iter_0000020"]), ckpt_step=20)


def test_commits_go_to_another_folder_where_save_says_so() -> None:
    plan = restore(disk(), load="/run", output=OUT)
    assert chosen(plan) == ("branches/c", 29, OUT)
    assert f"This session writes its commits to {OUT}." in plan.words
    assert f"Commits of this session go to {OUT}; queue, logs and metrics stay with the run in /run." in plan.words


@pytest.mark.parametrize("load", ["/run", "/run/branches/c", "/run/branches/b"])
def test_the_same_command_goes_on_in_the_other_folder_and_not_where_that_began(load: str) -> None:
    apart = Branch("o", CommitParent("c", 29), OUT, 40)
    found = disk(A, B, C, apart, commits={**COMMITS, OUT: [34]})
    plan = restore(found, load=load, output=OUT)
    assert chosen(plan) == (OUT, 34, OUT)
    assert f"--load {load} is where the session in {OUT} began, which goes on." in plan.words
    exact = restore(found, load="/run/branches/c/rollout/committed_29.json", output=OUT)
    assert chosen(exact) == ("branches/c", 29, f"{OUT}/branches/n"), "a commit that is named is gone back to"
    assert chosen(restore(found, load="/run")) == ("branches/c", 29, "branches/c"), "the run folder goes on by itself"


def test_what_is_in_another_folder_goes_on_there_and_the_run_folder_by_itself() -> None:
    apart = Branch("o", CommitParent("c", 29), OUT, 40)
    found = disk(A, B, C, apart, commits={**COMMITS, OUT: [34]})
    assert chosen(restore(found, output=OUT)) == (OUT, 34, OUT)
    assert chosen(restore(found, output=OUT, ckpt_step=9)) == (".", 9, f"{OUT}/branches/n")
    assert chosen(restore(found)) == ("branches/c", 29, "branches/c")
    assert chosen(restore(found, load=OUT)) == (OUT, 34, "branches/n")


def test_a_session_that_goes_on_in_another_folder_and_has_no_commit_begins_a_run_there() -> None:
    plan = restore(RunOnDisk(False, [], {}), output=OUT)
    assert (plan.mode, plan.directory) == (RestoreMode.NEW, OUT)


def test_an_ancestor_that_is_not_on_record_is_refused_naming_it() -> None:
    with pytest.raises(RestoreError, match="branch a is not in 1 known"):
        restore(disk(B))


def test_every_plan_says_what_was_chosen_and_why() -> None:
    for plan in (restore(disk()), restore(disk(), ckpt_step=9), restore(disk(), load="/run/rollout/committed_19.json")):
        assert plan.words[0].startswith(f"Resuming from the commit of rollout {plan.commit_rollout} (")
        assert Path("/run").name in plan.words[0]
