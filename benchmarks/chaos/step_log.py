"""The records of a run's steps, read on from where the last reading ended."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any


def steps_in(content: bytes) -> list[dict[str, Any]]:
    """Records of steps among JSON lines; a torn line is left out, and so are evaluations."""
    found = []
    for line in content.split(b"\n"):
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if "policy_version" in record:
                found.append(record)
    return found


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The records of all steps of all sessions, in the order they were written."""
    path = run / "metrics.jsonl"
    return steps_in(path.read_bytes()) if path.exists() else []


class StepLog:
    """Counts the steps of a growing log. Reads only what is new."""

    def __init__(self, run: Path) -> None:
        self._path = run / "metrics.jsonl"
        self._offset = 0
        self._count = 0
        self.last_rollout = -1
        """The highest one that was counted."""

    def count(self) -> int:
        """Whole lines of steps so far, of all sessions."""
        if not self._path.exists():
            return 0
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content.rfind(b"\n") + 1
        self._offset += whole
        steps = steps_in(content[:whole])
        self._count += len(steps)
        self.last_rollout = max([self.last_rollout, *(step["rollout_id"] for step in steps)])
        return self._count
