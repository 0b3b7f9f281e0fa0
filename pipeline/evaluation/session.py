"""The driver's side of evaluation: begins them, keeps publications from mixing their versions, and writes results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from pipeline.evaluation.records import EvaluationRecord
from pipeline.evaluation.schedule import EvaluationSchedule
from pipeline.evaluation.words import evaluation_words
from pipeline.progress import ProgressView
from pipeline.run_folder import RunFolder
from storage.files import append_durably
from vime.errors import StorageError, TooManyFailuresError

POLL_S = 1.0


class EvaluatingProducers(Protocol):
    """What is asked of the producers."""

    async def evaluate(self, step: int, branch: str) -> EvaluationRecord: ...
    async def evaluation_generated(self, step: int, branch: str) -> None: ...


@dataclass
class _Running:
    """An evaluation that has begun."""

    step: int
    task: asyncio.Task[EvaluationRecord]
    generating: asyncio.Task[None]
    started: float


class Evaluations:
    """Those of one session. They go on beside rollouts and training."""

    def __init__(
        self,
        producers: EvaluatingProducers,
        folder: RunFolder,
        view: ProgressView,
        schedule: EvaluationSchedule,
        *,
        copy: Callable[[EvaluationRecord], None],
        branch: str,
        publication_wait_s: float,
        stop_asked: Callable[[], bool],
    ) -> None:
        """`copy` is given each record after it was written. `publication_wait_s`: how long after its beginning an
        evaluation may hold up publications. Nothing is waited for when `stop_asked`.
        """
        self._producers, self._folder, self._view = producers, folder, view
        self.schedule, self.branch, self._publication_wait_s = schedule, branch, publication_wait_s
        self._copy, self._stop_asked = copy, stop_asked
        self._running: list[_Running] = []

    @property
    def are_going_on(self) -> bool:
        return bool(self._running)

    def begin(self, step: int) -> None:
        """Begin to evaluate the policy that serves now, after `step` rollout batches."""
        task = asyncio.create_task(self._producers.evaluate(step, self.branch))
        generating = asyncio.create_task(self._producers.evaluation_generated(step, self.branch))
        self._running.append(_Running(step, task, generating, time.monotonic()))

    @property
    def hold_versions(self) -> bool:
        """Whether responses are missing that a publication should wait for."""
        return any(self._left_s(running) > 0 for running in self._running)

    async def responses_are_there(self) -> None:
        """Wait until every response is there, so that one policy makes all; after a time the result may be mixed.

        Rewards aren't waited for, nor is anything when the user asks to stop.
        """
        for running in tuple(self._running):  # others may `collect` meanwhile
            waited_for = [running.task, running.generating]
            while (left_s := self._left_s(running)) > 0 and not self._stop_asked():
                await asyncio.wait(waited_for, timeout=min(left_s, POLL_S), return_when=asyncio.FIRST_COMPLETED)
        self.collect()

    def _left_s(self, running: _Running) -> float:
        """How long its responses may still hold up a publication."""
        if running.task.done() or running.generating.done():
            return 0.0
        return running.started + self._publication_wait_s - time.monotonic()

    def collect(self) -> None:
        """Write down and tell those that have ended. Raises what ended one."""
        for running in [running for running in self._running if running.task.done()]:
            self._running.remove(running)
            running.generating.cancel()
            self._keep(running.task.result())

    async def finish(self) -> None:
        """Wait for all, rewards included, or until the user asks to stop. Raises what ended one."""
        while self._running and not self._stop_asked():
            tasks = [running.task for running in self._running]
            await asyncio.wait(tasks, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            self.collect()
        for running in self._running:
            running.task.cancel()
            running.generating.cancel()
            self._view.note(f"The evaluation after step {running.step} was not finished.")
        self._running.clear()

    def _keep(self, record: EvaluationRecord) -> None:
        try:
            append_durably(self._folder.metrics, msgspec.json.encode(record))
        except StorageError as error:
            self._view.note(f"warning: the evaluation after step {record.evaluation} was not kept: {error}")
        self._copy(record)
        for warning in record.warnings:
            self._view.note(f"warning: {warning}")
        for line in [] if record.is_reported else evaluation_words(record):
            self._view.note(line)
        if self.schedule.evaluates_only:
            refuse_without_result(record)


def refuse_without_result(record: EvaluationRecord) -> None:
    """Raise `TooManyFailuresError` when a data set has no answer that could be scored, or nothing came at all."""
    empty = [each for each in record.data_sets if sum(each.failed.values()) == each.answers]
    if record.problem or empty:
        why = record.problem or "; ".join(f"{each.name}: {_reasons(each.failed)}" for each in empty)
        raise TooManyFailuresError(
            f"The evaluation has no result: {why}.",
            next_step=f"See {record.answers_file or 'the log of producer 0'} for the errors.",
        )


def _reasons(failed: dict[str, int]) -> str:
    return ", ".join(f"{count} failed ({reason})" for reason, count in failed.items())
