"""Seconds spent in a state."""

from __future__ import annotations

import time


class Stopwatch:
    """Adds up the time in a state that is entered and left."""

    def __init__(self) -> None:
        self._total = 0.0
        self._since: float | None = None

    def set(self, running: bool) -> None:
        """The state holds from now on, or does not."""
        now = time.monotonic()
        if self._since is not None:
            self._total += now - self._since
        self._since = now if running else None

    def total_s(self) -> float:
        return self._total + (time.monotonic() - self._since if self._since is not None else 0.0)
