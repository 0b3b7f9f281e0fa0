"""Tells the alarms of a running session: each when it is new, when it has got worse and when it is over."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from pipeline.alarm import Alarm
from pipeline.alarms import AlarmLimits, find_alarms
from pipeline.progress import StepRecord

WORSE = 2.0
"""Times as far past its threshold as when it was told last, an alarm is told again."""
OVER_AFTER = 3
"""Batches in a row without an alarm, after which it is over."""


class AlarmLog:
    """Of one session: batches of earlier ones don't count."""

    def __init__(
        self,
        note: Callable[[str], None],
        disk: Callable[[], tuple[int, int] | None] = lambda: None,
        limits: AlarmLimits | None = None,
    ) -> None:
        """`note` is told. `disk` gives (free, total) bytes of the file system under the queue, None where unknown."""
        self._note, self._disk, self._limits = note, disk, limits or AlarmLimits()
        self._steps: list[StepRecord] = []
        self._told: dict[str, float] = {}
        self._silent: dict[str, int] = {}
        self._standing: list[Alarm] = []

    def with_alarms(self, record: StepRecord) -> StepRecord:
        """The newest batch, with what is wrong with the run after it. It rolls back those from its number on."""
        window = self._limits.window
        self._steps = [step for step in self._steps if step.rollout_id < record.rollout_id] + [record]
        if len(self._steps) > 2 * window:
            del self._steps[window]
        self._standing = find_alarms(self._steps, disk=self._disk(), limits=self._limits)
        return msgspec.structs.replace(
            record,
            standing_alarms=self._standing,
            alarm_levels={alarm.name: alarm.level for alarm in self._standing},
        )

    def tell(self) -> None:
        """Say what has changed with the newest batch."""
        rings = {alarm.name for alarm in self._standing}
        for alarm in self._standing:
            self._silent[alarm.name] = 0
            told = self._told.get(alarm.name)
            if told is None or alarm.level >= WORSE * told:
                self._note(f"alarm{'' if told is None else ' (worse)'}: {alarm}")
                self._told[alarm.name] = alarm.level
        for name in self._told.keys() - rings:
            self._silent[name] += 1
            if self._silent[name] >= OVER_AFTER:
                del self._told[name]
                self._note(f"alarm over: {name}.")

    def tell_at_end(self) -> None:
        """Repeat what was still wrong at the newest batch."""
        for alarm in self._standing:
            self._note(f"At end still: {alarm}")


def disk_of(folder: Path) -> tuple[int, int] | None:
    """(free, total) bytes of the file system of a folder; None where it doesn't say."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.free, usage.total
