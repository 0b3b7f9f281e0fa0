"""What a sink's process is told before the first point."""

from __future__ import annotations

import msgspec


class TensorBoardConfig(msgspec.Struct, frozen=True, tag="tensorboard"):
    """Files for TensorBoard."""

    folder: str
    start_step: int
    """The session's first rollout batch; points of an earlier session from there on are superseded."""


class WandbConfig(msgspec.Struct, frozen=True, tag="wandb"):
    """A run at Weights & Biases. None: its library decides."""

    folder: str
    state: str
    """File that remembers, over sessions, which run it is and what it was told."""
    run_settings: str
    """File with the settings, without secrets."""
    default_name: str
    mode: str | None = None
    key: str | None = None
    host: str | None = None
    team: str | None = None
    group: str | None = None
    project: str | None = None
    run_id: str | None = None
    always_use_train_step: bool = False
    random_suffix: bool = True


SinkConfig = TensorBoardConfig | WandbConfig
