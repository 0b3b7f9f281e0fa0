"""What must go on while a run works: the end of any of it ends the work, and is told with the process's last lines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from pipeline.cluster import answer
from vime.backends.vllm_utils.startup_log import last_lines
from vime.errors import ProcessDiedError, RunFailedError, VimeError

_Result = TypeVar("_Result")

DEATH_S = 2.0
"""How long the end of a process may become known after the first error that it causes."""


class ProcessWatch:
    """Tasks that end only when something is wrong, each under the name of its process."""

    def __init__(self, log_of: Callable[[str], Path]) -> None:
        """`log_of` gives the log of the process of that name."""
        self._log_of = log_of
        self._watchers: dict[asyncio.Task[Any], tuple[str, type[RunFailedError]]] = {}

    def add(self, name: str, going_on: Awaitable[Any], error: type[RunFailedError] = RunFailedError) -> None:
        """Watch a process until it is forgotten; its end is raised as an `error`, a failure of its own as it is."""

        async def watch() -> Any:
            return await answer(going_on, name)

        self._watchers[asyncio.create_task(watch())] = (name, error)

    def forget(self, prefix: str) -> list[asyncio.Task[Any]]:
        """From now on nobody misses the processes whose names begin so; their watchers, which go on."""
        found = self.named(prefix)
        for task in found:
            del self._watchers[task]
        return found

    def named(self, prefix: str) -> list[asyncio.Task[Any]]:
        """The watchers of processes whose names begin so."""
        return [task for task, (name, _) in self._watchers.items() if name.startswith(prefix)]

    def failure_of(self, task: asyncio.Task[Any]) -> VimeError | None:
        """Forget a watcher; what it failed with, if it did."""
        failed = self._ended(task) if task.done() and task.exception() is not None else None
        del self._watchers[task]
        return failed

    async def guarded(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Await `work`, or fail as soon as a watched process ends.

        Raises:
            RunFailedError: a process ended; the message names it and shows its last log lines.
        """
        task = asyncio.create_task(work)
        try:
            await asyncio.wait([task, *self._watchers], return_when=asyncio.FIRST_COMPLETED)
            if self._watchers and task.done() and task.exception() is not None:
                # The work may fail of a process that is just ending; its end then tells more.
                await asyncio.wait(self._watchers, timeout=DEATH_S, return_when=asyncio.FIRST_COMPLETED)
            for watcher in self._watchers:
                if watcher.done():
                    raise self._ended(watcher)
            return await task
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        """Watch nothing any more."""
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)

    def _ended(self, watcher: asyncio.Task[Any]) -> VimeError:
        name, kind = self._watchers[watcher]
        error = watcher.exception() if not watcher.cancelled() else None
        if isinstance(error, VimeError) and type(error) not in (RunFailedError, ProcessDiedError):
            return error
        how = f"exit status {watcher.result()}" if error is None else _without_next_step(error)
        log = self._log_of(name)
        shown = "".join(f"\n  | {line}" for line in last_lines(log))
        return kind(
            f"{name} ended unexpectedly ({how}).\nLast lines of {log}:{shown}\n",
            next_step="Run the same command again; it resumes from the newest commit.",
        )


def _without_next_step(error: BaseException) -> str:
    return error.message if isinstance(error, VimeError) else str(error)
