"""What is due after a batch was trained. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.evaluation.schedule import EvaluationSchedule
from vime.settings.groups import Settings


@dataclass(frozen=True)
class DueWork:
    """In this order."""

    commit: bool
    publication: bool
    evaluation: bool
    """Of the version that is published; never without a publication."""
    goes_on: bool
    """Whether anything follows that needs the weights to be served."""


def due_after(step: int, settings: Settings, schedule: EvaluationSchedule) -> DueWork:
    """After the batch of this number, from 1. The last one is committed at the session's end, or to be evaluated."""
    is_last = step == schedule.num_rollout
    evaluates = schedule.is_due(step)
    interval = 1 if settings.cluster.release_train else settings.checkpoint.save_interval
    goes_on = evaluates or not is_last
    return DueWork(
        commit=(interval is not None and step % interval == 0) or (evaluates and is_last),
        publication=goes_on and (evaluates or step % settings.weights.update_weights_interval == 0),
        evaluation=evaluates,
        goes_on=goes_on,
    )
