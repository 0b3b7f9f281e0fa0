"""What the rank processes of a replay are told, through a file in their scratch folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pipeline.planner import BatchPlan
from storage.files import write_atomically
from vime.settings.groups import Settings

JOB_FILE = "job.msgpack"


class Stage(msgspec.Struct, frozen=True):
    """Rollouts that are trained one after the other under the same settings."""

    settings: Settings
    directory: str | None
    rollout_id: int | None
    """Folder and rollout of the checkpoint to start from; None: the weights that a run begins with."""
    plans: list[BatchPlan]
    saves: bool = False
    """Whether a checkpoint is left in the scratch folder, for the next stage."""


class ReplayJob(msgspec.Struct, frozen=True):
    """All of a replay."""

    world_size: int
    stages: list[Stage]


class RankError(msgspec.Struct, frozen=True):
    """The `VimeError` that ended a rank."""

    kind: str
    message: str
    next_step: str


def write_job(scratch: Path, job: ReplayJob) -> None:
    write_atomically(scratch / JOB_FILE, msgspec.msgpack.encode(job))


def read_job(scratch: Path) -> ReplayJob:
    return msgspec.msgpack.decode((scratch / JOB_FILE).read_bytes(), type=ReplayJob)


def error_path(scratch: Path, rank: int) -> Path:
    """Where a rank says what ended it."""
    return scratch / f"error_{rank}.json"


def log_path(scratch: Path, rank: int) -> Path:
    """What a rank prints."""
    return scratch / "logs" / f"rank_{rank}.log"
