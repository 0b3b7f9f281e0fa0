"""A rollout function's link to the run: what makes groups for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from vime.errors import RunFailedError
from vime.rollout.current_call import CurrentCall
from vime.rollout.group_collector import GroupCollector

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class RolloutCall:
    """One call of a rollout function, in a thread of its own."""

    collector: GroupCollector
    home: asyncio.AbstractEventLoop
    """The collector's."""

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine on the collector's loop, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.home).result()


_CURRENT = CurrentCall[RolloutCall](
    "rollout_call",
    lambda: RunFailedError(
        "A rollout function of vime's was called where no rollout is being made.",
        next_step="Call it from the function that --rollout-function-path names, in the same thread.",
    ),
)
bind, current_rollout = _CURRENT.bind, _CURRENT.get
