"""What a session is at. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One of the things that a session does in turn."""

    words: str
    """As after "step 41": "trains", "publishes weights"; empty for the wait for a batch."""
    step: int | None = None
    """Number of the step, from 1; None outside of steps."""
    groups_wanted: int | None = None
    """Groups that a batch is waited for with; None in other stages."""
    is_bounded: bool = True
    """Whether the stage may fail for want of progress; otherwise its own parts have their limits."""

    def __str__(self) -> str:
        return self.words if self.step is None else f"step {self.step} {self.words}".strip()


class StageBoard:
    """Holds the present stage; `number` tells one stage from the next, also where they are alike."""

    def __init__(self) -> None:
        self.stage = Stage("the session starts")
        self.number = 0

    def begin(self, stage: Stage) -> None:
        """The session goes on to another stage."""
        self.stage = stage
        self.number += 1
