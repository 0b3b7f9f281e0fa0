"""Named places in the life of a run at which a test can have the process that gets there killed.

Nothing happens unless the environment variable is set, which serves tests and `benchmarks.chaos` only.
"""

from __future__ import annotations

import enum
import os
import signal
from pathlib import Path

KILL_FILE_VARIABLE = "VIME_TEST_KILL_FILE"
"""Names a file whose content is the value of the `KillPoint` that kills the next process to get there."""


class KillPoint(enum.Enum):
    """Before and after each step that makes something durable or visible."""

    BEFORE_PUBLISH = "before-publish"
    """A producer has a finished group, and has not yet handed it to the pool."""
    AFTER_PUBLISH = "after-publish"
    """Groups are durable in the pool, and not yet accepted."""
    BEFORE_ACCEPT = "before-accept"
    """The coordinator was asked to accept groups."""
    AFTER_ACCEPT = "after-accept"
    """The journal has them, and their producer doesn't know it yet."""
    BEFORE_PLAN = "before-plan"
    """The driver has planned a batch that is not yet recorded."""
    AFTER_PLAN = "after-plan"
    """The plan is recorded, and no rank has it."""
    BEFORE_STEP = "before-step"
    """A rank is about to take an optimizer step."""
    AFTER_STEP = "after-step"
    """A rank has taken and logged it."""
    AFTER_TRAIN = "after-train"
    """All ranks have trained a batch, and the queue doesn't know it yet."""
    BEFORE_WEIGHTS = "before-weights"
    """The driver is about to publish weights."""
    DURING_WEIGHTS = "during-weights"
    """The engines hold or load a new version, and serve none."""
    AFTER_WEIGHTS = "after-weights"
    """They serve it, and the driver has written nothing of it."""
    BEFORE_SAVE = "before-save"
    """A rank is about to write its part of a checkpoint."""
    AFTER_SAVE = "after-save"
    """A rank has written it."""
    BEFORE_COMMIT = "before-commit"
    """Checkpoint and queue state are there, and the commit record is not."""
    AFTER_COMMIT = "after-commit"
    """The commit record is there, and the queue has not rotated."""


def reach(point: KillPoint) -> None:
    """Kill this process by SIGKILL if it is the first to get to the point that was asked for."""
    name = os.environ.get(KILL_FILE_VARIABLE)
    if name is None:
        return
    asked = Path(name)
    try:
        if asked.read_text() != point.value:
            return
        asked.rename(asked.with_suffix(".taken"))  # only one process succeeds
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
