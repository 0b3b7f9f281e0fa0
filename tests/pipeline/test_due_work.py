"""What is due after each batch of a short run."""

from __future__ import annotations

from pipeline.due_work import due_after
from pipeline.evaluation.schedule import EvaluationSchedule
from vime.settings.parse import parse_settings

NUM_ROLLOUT = 6


def due_steps(*words: str, eval_interval: int | None = None) -> dict[str, list[int]]:
    """Kind of work -> the batches after which it is due."""
    settings = parse_settings(list(words))
    schedule = EvaluationSchedule(eval_interval, NUM_ROLLOUT, before_training=True)
    due = {step: due_after(step, settings, schedule) for step in range(1, NUM_ROLLOUT + 1)}
    kinds = ("commit", "publication", "evaluation", "goes_on")
    return {kind: [step for step, work in due.items() if getattr(work, kind)] for kind in kinds}


def test_intervals_say_when_and_the_last_batch_is_not_published() -> None:
    due = due_steps("--save-interval", "4", "--update-weights-interval", "2")
    assert due == {"commit": [4], "publication": [2, 4], "evaluation": [], "goes_on": [1, 2, 3, 4, 5]}


def test_without_an_interval_the_session_commits_at_its_end_alone() -> None:
    assert due_steps()["commit"] == []


def test_what_is_evaluated_is_published_and_the_last_batch_is_committed_before() -> None:
    due = due_steps("--update-weights-interval", "5", eval_interval=4)
    assert due == {"commit": [6], "publication": [4, 5, 6], "evaluation": [4, 6], "goes_on": [1, 2, 3, 4, 5, 6]}


def test_ranks_that_end_after_each_batch_commit_each() -> None:
    assert due_steps("--release-train", "--save-interval", "4")["commit"] == [1, 2, 3, 4, 5, 6]
