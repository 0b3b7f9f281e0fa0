"""`metrics.jsonl`, read as it grows: the steps that count, evaluations, and the lines that can't be read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pipeline.progress import StepRecord
from vime.errors import StorageError


@dataclass(frozen=True)
class Evaluation:
    """One evaluation."""

    rollouts_before: int
    time_s: float
    seconds: float
    metrics: dict[str, float]
    problem: str


@dataclass
class RunMetrics:
    """What the lines read so far add up to."""

    steps: list[StepRecord] = field(default_factory=list)
    """Rollout batches along the newest branch, ascending by `rollout_id`."""
    num_rolled_back: int = 0
    """Batches that a later session has trained anew."""
    evaluations: list[Evaluation] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Lines that can't be read, each with file and line."""
    serial: int = 0
    """Rises with every change."""


class MetricsFile:
    """One file. Only what was appended since the last call is parsed; a file that got shorter is read anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = self._line = 0
        self.metrics = RunMetrics()

    def refresh(self) -> RunMetrics:
        """Read what is new. A last line without its end is still being written and waits.

        Raises `StorageError` when the file can't be read; one that doesn't exist has no lines.
        """
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._offset:
                    self._offset = self._line = 0
                    self.metrics = RunMetrics(serial=self.metrics.serial + 1)
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return self.metrics
        except OSError as error:
            raise StorageError(
                f"{self._path}: {error.strerror}.", next_step="Check the mount and the file's rights."
            ) from error
        whole = content[: content.rfind(b"\n") + 1]
        for line in whole.split(b"\n")[:-1]:
            self._line += 1
            if line.strip():
                self._add(line)
        self._offset += len(whole)
        self.metrics.serial += bool(whole)
        return self.metrics

    def _add(self, line: bytes) -> None:
        try:
            raw = msgspec.json.decode(line, type=dict[str, Any])
            if "evaluation" in raw:
                self.metrics.evaluations.append(_evaluation(raw))
            else:
                add_step(self.metrics, msgspec.convert(_with_nan(raw), StepRecord))
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
            self.metrics.problems.append(f"{self._path}:{self._line}: not a line of metrics ({error})")


def add_step(metrics: RunMetrics, step: StepRecord) -> None:
    """A batch that was trained after all before it: those from its number on were rolled back."""
    kept = [known for known in metrics.steps if known.rollout_id < step.rollout_id]
    if len(kept) < len(metrics.steps):
        metrics.num_rolled_back += len(metrics.steps) - len(kept)
        metrics.steps = kept
    metrics.steps.append(step)


def _with_nan(raw: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: null stands for a number that wasn't finite."""
    train = raw.get("train")
    named = {name: math.nan if value is None else value for name, value in raw.items()}
    if isinstance(train, dict):
        named["train"] = {name: math.nan if value is None else value for name, value in train.items()}
    return named


def _evaluation(raw: dict[str, Any]) -> Evaluation:
    metrics = {str(name): float(value) for name, value in raw["metrics"].items() if value is not None}
    return Evaluation(
        int(raw["evaluation"]), float(raw["time_s"]), float(raw["seconds"]), metrics, str(raw.get("problem", ""))
    )
