"""How often processes may be started again before a run gives up. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable

PERIOD_S = 3600.0
"""Restarts that are longer ago are forgotten."""


class RestartBudget:
    """Counts the restarts of one process, or of a group that restarts together."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        """At most `limit` restarts within `PERIOD_S`; `clock` gives seconds and never goes back."""
        self.limit, self._clock = limit, clock
        self._taken_at: list[float] = []

    def take(self) -> str | None:
        """Take one restart: "restart 1 of 3"; None when there is none left."""
        now = self._clock()
        self._taken_at = [at for at in self._taken_at if at > now - PERIOD_S]
        if len(self._taken_at) >= self.limit:
            return None
        self._taken_at.append(now)
        return f"restart {len(self._taken_at)} of {self.limit}"
