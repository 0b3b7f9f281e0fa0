"""What the sinks write is read back by the libraries that it is written for."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.metric_sinks.configs import TensorBoardConfig, WandbConfig
from pipeline.metric_sinks.feed import SinkFeed
from pipeline.metric_sinks.point import Point
from pipeline.metric_sinks.points import batch_point, evaluation_point
from pipeline.metric_sinks.sinks import COMMAND, MetricSinks, sink_configs
from pipeline.metric_sinks.tensorboard_sink import TensorBoardSink
from pipeline.run_folder import RunFolder
from tests.pipeline.metric_sinks.records_for_sinks import evaluation_record, step_record
from tests.pipeline.metric_sinks.wandb_file import OfflineRun, offline_run
from vime.settings.parse import parse_settings

END_TIMEOUT_S = 90.0


def batch(rollout_id: int, reward: float) -> Point:
    return batch_point(step_record(rollout_id, reward_mean=reward), 1, is_told=False)


def evaluation(step: int, value: float) -> Point:
    point = evaluation_point(evaluation_record(step, metrics={"eval/math": value}), 1)
    assert point is not None
    return point


def tensorboard_session(folder: Path, start_step: int, points: list[Point]) -> None:
    sink = TensorBoardSink(TensorBoardConfig(str(folder), start_step))
    for point in points:
        sink.write(point)
    sink.close()


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) as TensorBoard shows them."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, pytest.approx(event.value)) for event in events.Scalars(name)]


def test_tensorboard_reads_the_series(tmp_path: Path) -> None:
    tensorboard_session(tmp_path, 0, [evaluation(0, 0.1), batch(0, 0.5), batch(1, 0.75)])
    assert scalars(tmp_path, "rollout/raw_reward") == [(0, 0.5), (1, 0.75)]
    assert scalars(tmp_path, "train/loss") == [(0, 0.125), (1, 0.125)]
    assert scalars(tmp_path / "eval", "eval/math") == [(0, 0.1)]


def test_tensorboard_shows_no_step_twice_after_a_resume(tmp_path: Path) -> None:
    tensorboard_session(
        tmp_path, 0, [batch(0, 0.1), batch(1, 0.2), evaluation(2, 0.3), batch(2, 0.4), evaluation(3, 0.5)]
    )
    tensorboard_session(tmp_path, 2, [batch(2, 0.6), evaluation(3, 0.7)])
    assert scalars(tmp_path, "rollout/raw_reward") == [(0, 0.1), (1, 0.2), (2, 0.6)]
    assert scalars(tmp_path / "eval", "eval/math") == [(2, 0.3), (3, 0.7)]


def test_tensorboard_shows_no_step_twice_when_a_session_goes_back(tmp_path: Path) -> None:
    tensorboard_session(tmp_path, 0, [batch(0, 0.1), batch(1, 0.2), batch(1, 0.3), batch(2, 0.4)])
    assert scalars(tmp_path, "rollout/raw_reward") == [(0, 0.1), (1, 0.3), (2, 0.4)]


def wandb_session(config: WandbConfig, log: Path, rollouts: list[int]) -> None:
    said: list[str] = []
    sinks = MetricSinks([SinkFeed("wandb", COMMAND, msgspec.json.encode(config), log)], 2, said.append)
    for rollout_id in rollouts:
        sinks.batch(step_record(rollout_id), is_told=False)
    sinks.evaluation(evaluation_record(rollouts[-1] + 1))
    sinks.close(END_TIMEOUT_S)
    assert said == []


def offline_runs(folder: Path) -> list[OfflineRun]:
    """Each session's, in their order."""
    paths = folder.glob("wandb/offline-run-*/run-*.wandb")
    return [offline_run(path) for path in sorted(paths, key=lambda path: path.stat().st_mtime)]


def test_wandb_continues_its_offline_run_and_tells_no_step_twice(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{"lr": 0.5}')
    settings = parse_settings(["--use-wandb", "--wandb-mode", "offline", "--wandb-group", "trial"])
    (config,) = sink_configs(settings.logging, RunFolder(tmp_path, tmp_path / "pool"), 0).values()
    assert isinstance(config, WandbConfig)
    wandb_session(config, tmp_path / "sink.log", [0, 1, 2])
    wandb_session(config, tmp_path / "sink.log", [1, 2, 3])
    first, second = offline_runs(tmp_path)
    assert (first.run_id, first.name) == (second.run_id, second.name)
    assert first.name.startswith("trial_")
    rows = [*first.rows, *second.rows]
    assert [row["rollout/step"] for row in rows if "train/loss" in row] == [0, 1, 2, 3]
    assert [row["rollout/step"] for row in rows if "eval/math" in row] == [3, 4]
    assert first.rows[1]["train/step"] == 3
    assert first.rows[1]["rollout/response_len/max"] == 9


def test_why_a_sink_cannot_be_opened_reaches_the_user(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = TensorBoardConfig(str(tmp_path / "file" / "below"), 0)
    sink = SinkFeed("tensorboard", COMMAND, msgspec.json.encode(config), tmp_path / "sink.log")
    words = sink.close(END_TIMEOUT_S)
    assert words.startswith("tensorboard: NotADirectoryError: ")
    assert "metrics.jsonl has every point" in words
