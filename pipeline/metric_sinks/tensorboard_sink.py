"""Writes points as scalars into TensorBoard's event files."""

from __future__ import annotations

import time
from pathlib import Path

from tensorboardX import SummaryWriter

from pipeline.metric_sinks.configs import TensorBoardConfig
from pipeline.metric_sinks.point import ROLLOUT_STEP, Kind, Point


class TensorBoardSink:
    """The step of every scalar is that of its rollout batch; evaluations have a folder of their own.

    A point at a step that was written before supersedes it and all later ones of its kind.
    """

    def __init__(self, config: TensorBoardConfig) -> None:
        folder = Path(config.folder)
        self._folders = {Kind.BATCH: folder, Kind.EVALUATION: folder / "eval"}
        # The evaluation after the last batch that is kept belongs to what is kept.
        self._writers = {
            Kind.BATCH: self._writer(Kind.BATCH, config.start_step),
            Kind.EVALUATION: self._writer(Kind.EVALUATION, config.start_step + 1),
        }
        self._last: dict[Kind, int] = {}

    def write(self, point: Point) -> None:
        if point.step <= self._last.get(point.kind, -1):
            self._writers[point.kind].close()
            self._writers[point.kind] = self._writer(point.kind, point.step)
        self._last[point.kind] = point.step
        writer = self._writers[point.kind]
        for name, value in point.values.items():
            if name != ROLLOUT_STEP:
                writer.add_scalar(name, value, global_step=point.step, walltime=point.time_s)
        writer.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _writer(self, kind: Kind, purge_step: int) -> SummaryWriter:
        # Files are named by the second, and read in the order of their names.
        suffix = f".{time.time_ns()}"
        return SummaryWriter(str(self._folders[kind]), purge_step=purge_step, filename_suffix=suffix)
