"""Ctrl-C: the first one finishes the step and commits, the second one stops at once."""

from __future__ import annotations

import asyncio
import enum
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from pipeline.progress import ProgressView


class Ending(enum.Enum):
    """How a session ends when no error ends it."""

    DONE = "done"
    """Every rollout is trained and committed."""
    INTERRUPTED = "interrupted"
    """The user stopped it; the same command resumes."""


class Interrupts:
    """Runs a session under the two-step rule. Use with `with`."""

    def __init__(self, view: ProgressView) -> None:
        self._view = view
        self._runner = asyncio.Runner()
        self._may_finish = False
        self.stop_asked = False

    def __enter__(self) -> Self:
        self._runner.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._runner.close()

    def run(self, session: Coroutine[Any, Any, Ending]) -> Ending:
        """Run to the end, or until it is stopped at once."""
        loop = self._runner.get_loop()
        task = loop.create_task(session)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, task)
        try:
            return loop.run_until_complete(task)
        except asyncio.CancelledError:
            self._view.note("Stopped at once; nothing was committed. Resume from the newest commit.")
            return Ending.INTERRUPTED
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    @contextmanager
    def finishing_steps(self) -> Iterator[None]:
        """Inside, the first signal asks for a stop after the current step; outside, it stops at once."""
        self._may_finish = True
        try:
            yield
        finally:
            self._may_finish = self.stop_asked

    def _on_signal(self, task: asyncio.Task[Ending]) -> None:
        if self._may_finish and not self.stop_asked:
            self.stop_asked = True
            self._view.note("Finishing the step, then committing. Ctrl-C again stops at once.")
            return
        task.cancel()
