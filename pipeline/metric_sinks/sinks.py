"""The sinks of a session: fed after the run folder's own file was written, never waited for."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pipeline.evaluation.records import EvaluationRecord
from pipeline.metric_sinks.configs import SinkConfig, TensorBoardConfig, WandbConfig
from pipeline.metric_sinks.feed import CLOSE_TIMEOUT_S, SinkFeed
from pipeline.metric_sinks.point import Point
from pipeline.metric_sinks.points import batch_point, evaluation_point
from pipeline.progress import StepRecord
from pipeline.prometheus.exporter import clear_targets, start_exporter
from pipeline.prometheus.records import EvaluationNumbers
from pipeline.run_folder import RunFolder
from vime.settings.groups import Settings
from vime.settings.groups.logging import LoggingSettings

COMMAND = (sys.executable, "-m", "pipeline.metric_sinks")


class MetricSinks:
    """Copies records to all sinks and tells once what is wrong with one; answers scrapes with the newest."""

    def __init__(self, feeds: Sequence[SinkFeed], steps_per_rollout: int, note: Callable[[str], None]) -> None:
        self._feeds, self._steps_per_rollout, self._note = feeds, steps_per_rollout, note
        self._newest: dict[str, msgspec.Struct] = {}

    def newest(self) -> Mapping[str, msgspec.Struct]:
        """Role of `pipeline.prometheus.records.ROLES` -> newest record."""
        return dict(self._newest)

    def batch(self, record: StepRecord, *, is_told: bool) -> None:
        """`is_told`: the user's own function has reported the batch."""
        self._newest["run"] = record
        self._offer(batch_point(record, self._steps_per_rollout, is_told=is_told))

    def evaluation(self, record: EvaluationRecord) -> None:
        self._newest["evaluation"] = EvaluationNumbers(record.evaluation, record.metrics)
        self._offer(evaluation_point(record, self._steps_per_rollout))

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End all within the time together; says what was lost."""
        until = time.monotonic() + timeout_s
        for feed in self._feeds:
            if words := feed.close(max(0.1, until - time.monotonic())):
                self._note(f"warning: {words}")

    def _offer(self, point: Point | None) -> None:
        if point is None:
            return
        for feed in self._feeds:
            feed.offer(msgspec.json.encode(point))
            if problem := feed.problem():
                self._note(f"warning: {problem}")


@contextmanager
def open_sinks(
    settings: Settings, folder: RunFolder, start_rollout: int, note: Callable[[str], None]
) -> Iterator[MetricSinks]:
    """The sinks that the flags ask for. `start_rollout`: the session's first rollout batch."""
    feeds = [
        SinkFeed(name, COMMAND, msgspec.json.encode(config), folder.log(f"sink_{name}"))
        for name, config in sink_configs(settings.logging, folder, start_rollout).items()
    ]
    sinks = MetricSinks(feeds, settings.data.steps_per_rollout if settings.data.samples_per_step else 1, note)
    clear_targets(folder)
    exporter, problem = start_exporter(settings.logging, folder, "run", sinks.newest)
    if problem:
        note(f"warning: {problem}")
    try:
        yield sinks
    finally:
        if exporter is not None:
            exporter.close()
        clear_targets(folder)
        sinks.close()


def sink_configs(logging: LoggingSettings, folder: RunFolder, start_rollout: int) -> dict[str, SinkConfig]:
    """Name of a sink -> what its process is told."""
    found: dict[str, SinkConfig] = {}
    if logging.use_tensorboard:
        parts = [name for name in (logging.tb_project_name, logging.tb_experiment_name) if name]
        found["tensorboard"] = TensorBoardConfig(str(folder.root.joinpath("tensorboard", *parts)), start_rollout)
    if logging.use_wandb and logging.wandb_mode != "disabled":
        found["wandb"] = WandbConfig(
            folder=str(Path(logging.wandb_dir or folder.root).absolute()),
            state=str(folder.root / "wandb_run.json"),
            run_settings=str(folder.settings),
            default_name=folder.root.name,
            mode=logging.wandb_mode,
            key=logging.wandb_key,
            host=logging.wandb_host,
            team=logging.wandb_team,
            group=logging.wandb_group,
            project=logging.wandb_project,
            run_id=logging.wandb_run_id,
            always_use_train_step=logging.wandb_always_use_train_step,
            random_suffix=logging.wandb_random_suffix,
        )
    return found
