"""What becomes of an evaluation's answers: a file of them, a record, a dump, and the user's own report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipeline.evaluation.answers import write_answers
from pipeline.evaluation.dumps import EvaluationDumps
from pipeline.evaluation.log_function import EvalLog
from pipeline.evaluation.records import EvalAnswer, EvaluationRecord
from pipeline.evaluation.scores import evaluation_record
from vime.errors import StorageError

AnswersBySet = Mapping[str, Sequence[EvalAnswer]]
DataBySet = Mapping[str, Mapping[str, Any]]
"""Name of a data set -> its rewards, truncated and samples, as the user's functions get them."""


class ResultKeeper:
    """Keeps the results of a run's evaluations."""

    def __init__(self, run_folder: Path, log: EvalLog | None = None, dumps: EvaluationDumps | None = None) -> None:
        self._run_folder, self._log, self._dumps = run_folder, log, dumps

    async def keep(
        self,
        answers: AnswersBySet,
        data: DataBySet,
        *,
        step: int,
        branch: str,
        started: float,
        generate_s: float,
        more_metrics: Mapping[str, float] | None = None,
        problem: str = "",
    ) -> EvaluationRecord:
        """Write the answers to `evaluations/<step>.jsonl`; the record, after dump and report.

        `started` is of `time.monotonic`. With a `problem` there is neither. What can't be written is a
        warning of the record.
        """
        path = self._run_folder / "evaluations" / f"{step}.jsonl"
        lost = await asyncio.to_thread(_written, path, answers) if answers else []
        record = evaluation_record(
            answers,
            evaluation=step,
            branch=branch,
            generate_s=generate_s,
            seconds=time.monotonic() - started,
            answers_file=str(path.relative_to(self._run_folder)) if answers and not lost else "",
            more_metrics=more_metrics,
            problem=problem,
        )
        record = msgspec.structs.replace(record, warnings=[*record.warnings, *lost])
        if problem:
            return record
        if self._dumps is not None:
            samples = {name: of_set.get("samples") or [] for name, of_set in data.items()}
            warnings = await self._dumps.save(step, branch, samples)
            record = msgspec.structs.replace(record, warnings=[*record.warnings, *warnings])
        return record if self._log is None else await self._log(record, data)


def _written(path: Path, answers: AnswersBySet) -> list[str]:
    """Write the answers; a warning where they can't be."""
    try:
        write_answers(path, [answer for of_set in answers.values() for answer in of_set])
    except StorageError as error:
        return [f"the answers were not kept: {error}"]
    return []
