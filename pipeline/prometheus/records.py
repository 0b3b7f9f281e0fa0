"""Which records the processes of a run answer to a scrape, by role."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pipeline.messages import ProducerStats, QueueCounts, TrainReport
from pipeline.progress import StepRecord


class EvaluationNumbers(msgspec.Struct, frozen=True):
    """The newest evaluation."""

    step: int
    """Rollout batches that were trained before."""
    metrics: dict[str, float]
    """`eval/NAME` and more."""


ROLES: Mapping[str, type[msgspec.Struct]] = {
    "run": StepRecord,
    "evaluation": EvaluationNumbers,
    "coordinator": QueueCounts,
    "producer": ProducerStats,
    "trainer": TrainReport,
}
"""Role -> its record; the evaluation is told by the run's own process."""


def trainer_numbers(report: TrainReport | None) -> Mapping[str, msgspec.Struct]:
    """What a rank answers: its newest report, nothing before it."""
    return {} if report is None else {"trainer": report}
