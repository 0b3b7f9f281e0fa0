"""What a sink is given."""

from __future__ import annotations

import enum

import msgspec

ROLLOUT_STEP, TRAIN_STEP = "rollout/step", "train/step"


class Kind(enum.Enum):
    """What a point tells of. Steps of either kind rise by themselves."""

    BATCH = "batch"
    EVALUATION = "evaluation"


class Point(msgspec.Struct, frozen=True):
    """Values of one step."""

    kind: Kind
    step: int
    """The rollout batch, from 0; of an evaluation the batches that were trained before."""
    time_s: float
    """Unix time."""
    values: dict[str, float]
    """Series -> value; always with `rollout/step` and `train/step`."""
