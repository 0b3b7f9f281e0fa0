"""Logs points to a run at Weights & Biases, or into its offline files."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any, cast

import msgspec
import wandb

from pipeline.metric_sinks.configs import WandbConfig
from pipeline.metric_sinks.point import ROLLOUT_STEP, TRAIN_STEP, Kind, Point
from storage.files import write_atomically
from vime.errors import SettingsError, reason_of


class WandbState(msgspec.Struct):
    """What is remembered over sessions."""

    run_id: str
    name: str
    last: dict[Kind, int] = {}
    """Kind -> highest step that was logged."""


class WandbSink:
    """Continues the run of the session before. Steps that it was told are not told again: rows there can't be undone,
    so that what a resume trains anew stays as it was first."""

    def __init__(self, config: WandbConfig) -> None:
        self._path = Path(config.state)
        self._state = wandb_state(config)
        if config.key is not None:
            os.environ["WANDB_API_KEY"] = config.key
        if config.host is not None:
            os.environ["WANDB_BASE_URL"] = config.host
        Path(config.folder).mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            id=self._state.run_id,
            name=self._state.name,
            resume="allow",
            project=config.project,
            entity=config.team,
            group=config.group,
            dir=config.folder,
            mode=cast(Any, config.mode),
            config=json.loads(Path(config.run_settings).read_bytes()),
            settings=wandb.Settings(console="off"),
        )
        for axis in (ROLLOUT_STEP, TRAIN_STEP):
            self._run.define_metric(axis)
        others = TRAIN_STEP if config.always_use_train_step else ROLLOUT_STEP
        for prefix in ("rollout", "perf", "queue", "eval"):
            self._run.define_metric(f"{prefix}/*", step_metric=others)
        self._run.define_metric("train/*", step_metric=TRAIN_STEP)
        self._keep()

    def write(self, point: Point) -> None:
        if point.step <= self._state.last.get(point.kind, -1):
            return
        self._run.log(point.values)
        self._state.last[point.kind] = point.step
        self._keep()

    def close(self) -> None:
        self._run.finish()

    def _keep(self) -> None:
        write_atomically(self._path, msgspec.json.encode(self._state))


def wandb_state(config: WandbConfig) -> WandbState:
    """The run of the session before, unless the flags name another one; a new one where there is none."""
    path = Path(config.state)
    if path.exists():
        try:
            state = msgspec.json.decode(path.read_bytes(), type=WandbState)
        except (OSError, msgspec.MsgspecError) as error:
            raise SettingsError(
                f"{path}: damaged ({reason_of(error)}).",
                next_step="Remove the file, and name the run at Weights & Biases with --wandb-run-id to go on with it.",
            ) from error
        if config.run_id in (None, state.run_id):
            return state
    run_id = config.run_id or secrets.token_hex(4)
    name = config.group or config.default_name
    return WandbState(run_id, f"{name}_{secrets.token_hex(3)}" if config.random_suffix else name)
