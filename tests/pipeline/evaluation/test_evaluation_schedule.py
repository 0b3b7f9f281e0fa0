"""When a run evaluates, and what counts as done already."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pipeline.evaluation.records import EvaluationRecord, read_evaluations
from pipeline.evaluation.schedule import EvaluationSchedule, is_evaluated
from pipeline.evaluation.start import evaluates_first, highest_evaluated_version
from recovery.branch import Branch, append_branch
from recovery.commit import CommitParent
from storage.files import append_durably
from vime.settings.groups import Settings
from vime.settings.parse import parse_settings

DATA = ["--eval-prompt-data", "a.jsonl", "--eval-interval", "2"]


def settings(*argv: str) -> Settings:
    return parse_settings([*DATA, *argv])


def due(*argv: str, data: bool = True) -> list[int]:
    schedule = EvaluationSchedule.of(settings(*argv), has_data=data)
    return [step for step in range(6) if schedule.is_due(step)]


def test_a_run_evaluates_before_training_at_its_interval_and_at_its_end() -> None:
    assert due("--num-rollout", "5") == [0, 2, 4, 5]
    assert due("--num-rollout", "5", "--skip-eval-before-train") == [2, 4, 5]
    assert due("--num-rollout", "5", data=False) == []


def test_the_end_of_each_epoch_is_evaluated_where_the_run_is_as_long_as_its_epochs() -> None:
    in_epochs = ("--num-rollout", "5", "--num-epoch", "5")
    assert due(*in_epochs, "--eval-interval", "4") == [0, 1, 2, 3, 4, 5]
    assert due("--num-rollout", "6", "--num-epoch", "2", "--eval-interval", "2") == [0, 2, 3, 4]
    assert due(*in_epochs, data=False) == []


def test_a_run_without_training_evaluates_what_it_begins_with() -> None:
    assert EvaluationSchedule.of(settings("--num-rollout", "0"), has_data=True).is_due(3)


def record(evaluation: int, branch: str, problem: str = "") -> EvaluationRecord:
    return EvaluationRecord(
        evaluation=evaluation, branch=branch, time_s=0.0, generate_s=0.0, seconds=0.0, policy_version=1,
        policy_versions=[1], metrics={}, data_sets=[], problem=problem,
    )  # fmt: skip


COMMIT = CommitParent("first", 3)
BRANCHES = [
    Branch("first", None, ".", 0),
    Branch("second", COMMIT, ".", 5),
    Branch("other", CommitParent("first", 1), ".", 3),
]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (record(4, "first"), True),
        (record(4, "second"), True),
        (record(4, "other"), False),
        (record(2, "first"), False),
        (record(4, "first", "it raised"), False),
    ],
    ids=[
        "of the commit's session",
        "of a session that began there",
        "of other weights",
        "of another step",
        "no result",
    ],
)
def test_only_a_result_of_the_same_weights_counts(found: EvaluationRecord, expected: bool) -> None:
    assert is_evaluated(4, COMMIT, [found], BRANCHES) is expected


def test_an_evaluation_before_training_is_one_of_a_session_that_began_a_run() -> None:
    assert is_evaluated(0, None, [record(0, "first")], BRANCHES)
    assert not is_evaluated(0, None, [record(0, "second")], BRANCHES)


def test_a_resume_repeats_no_evaluation_and_makes_up_for_a_missing_one(tmp_path: Path) -> None:
    run, flags = tmp_path, settings("--num-rollout", "4")
    append_branch(run, Branch("first", None, ".", 0))
    assert evaluates_first(flags, run, step=4, parent=COMMIT)
    append_durably(run / "metrics.jsonl", msgspec.json.encode(record(4, "first")))
    assert not evaluates_first(flags, run, step=4, parent=COMMIT)
    assert not evaluates_first(flags, run, step=3, parent=CommitParent("first", 2))
    assert evaluates_first(settings("--num-rollout", "0"), run, step=4, parent=COMMIT)


def test_versions_that_results_are_labelled_with_are_not_used_again(tmp_path: Path) -> None:
    assert highest_evaluated_version(tmp_path) == 0
    for versions in ([4, 5], [3]):
        labelled = msgspec.structs.replace(record(4, "first"), policy_versions=versions)
        append_durably(tmp_path / "metrics.jsonl", msgspec.json.encode(labelled))
    assert highest_evaluated_version(tmp_path) == 5


def test_lines_of_steps_and_torn_lines_are_no_evaluations() -> None:
    lines = [
        b'{"rollout_id": 3, "reward_mean": 0.5}',
        msgspec.json.encode(record(4, "first")),
        b'{"evaluation": 5, "br',
    ]
    assert [found.evaluation for found in read_evaluations(b"\n".join(lines))] == [4]
