"""Whether a session begins with an evaluation."""

from __future__ import annotations

from pathlib import Path

from pipeline.evaluation.records import read_evaluations
from pipeline.evaluation.schedule import EvaluationSchedule, is_evaluated
from recovery.branch import read_branches
from recovery.commit import CommitParent
from vime.settings.groups import Settings
from vime.settings.schemas.eval_sets import evaluation_sets


def evaluates_first(settings: Settings, run: Path, *, step: int, parent: CommitParent | None) -> bool:
    """Whether a session that begins at `step`, with the weights of the commit `parent`, evaluates them first.

    Not when they have a result already; in a run that only evaluates always.
    """
    schedule = evaluation_schedule(settings)
    if schedule.evaluates_only or not schedule.is_due(step):
        return schedule.evaluates_only
    metrics = run / "metrics.jsonl"
    records = read_evaluations(metrics.read_bytes()) if metrics.exists() else []
    return not is_evaluated(step, parent, records, read_branches(run))


def evaluation_schedule(settings: Settings) -> EvaluationSchedule:
    return EvaluationSchedule.of(settings, has_data=bool(evaluation_sets(settings)))
