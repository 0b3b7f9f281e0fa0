"""Ctrl-C: the first one finishes the step and commits, the second one stops at once."""

from __future__ import annotations

import asyncio
import enum
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from pipeline.progress import ProgressView


class Ending(enum.Enum):
    """How a session ends when no error ends it."""

    DONE = "done"
    """Every rollout is trained and committed."""
    INTERRUPTED = "interrupted"
    """The user stopped it; the same command resumes."""


class Interrupts:
    """Runs a session under the two-step rule. Use with `with`, from the first thing on that a user may want to stop.

    Before `run`, Ctrl-C is a `KeyboardInterrupt`; where other code keeps that from getting on, `run` doesn't begin.
    """

    def __init__(self, view: ProgressView) -> None:
        self._view = view
        self._runner = asyncio.Runner()
        self._may_finish, self._was_early = False, False
        self._handler_before: Any = None
        self.stop_asked = False

    def __enter__(self) -> Self:
        self._runner.__enter__()
        self._handler_before = signal.signal(signal.SIGINT, self._on_early_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._runner.close()
        signal.signal(signal.SIGINT, self._handler_before)

    def run(self, session: Coroutine[Any, Any, Ending]) -> Ending:
        """Run to the end, or until it is stopped at once."""
        if self._was_early:
            session.close()
            return self._stopped_at_once()
        loop = self._runner.get_loop()
        task = loop.create_task(session)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, task)
        try:
            return loop.run_until_complete(task)
        except asyncio.CancelledError:
            return self._stopped_at_once()
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

    def _stopped_at_once(self) -> Ending:
        self._view.note(
            "Stopped at once; nothing was committed. The same command goes on from the newest commit, or begins anew."
        )
        return Ending.INTERRUPTED

    def _on_early_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._was_early = True
        raise KeyboardInterrupt

    def _on_signal(self, task: asyncio.Task[Ending]) -> None:
        if self._may_finish and not self.stop_asked:
            self.stop_asked = True
            self._view.note("Finishing the step, then committing. Ctrl-C again stops at once.")
            return
        task.cancel()
