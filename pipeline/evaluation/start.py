"""Whether a session begins with an evaluation."""

from __future__ import annotations

from pathlib import Path

from pipeline.evaluation.records import EvaluationRecord, read_evaluations
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
    return not is_evaluated(step, parent, _records(run), read_branches(run))


def highest_evaluated_version(run: Path) -> int:
    """The newest policy version that a result is labelled with; 0 without one."""
    return max((version for record in _records(run) for version in record.policy_versions), default=0)


def evaluation_schedule(settings: Settings) -> EvaluationSchedule:
    return EvaluationSchedule.of(settings, has_data=bool(evaluation_sets(settings)))


def _records(run: Path) -> list[EvaluationRecord]:
    metrics = run / "metrics.jsonl"
    return read_evaluations(metrics.read_bytes()) if metrics.exists() else []
