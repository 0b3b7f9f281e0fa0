"""An evaluation function's link to the run: vime's own evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from vime.errors import RunFailedError
from vime.rollout.base_types import RolloutFnEvalOutput


@dataclass(frozen=True)
class EvaluationCall:
    """One call of an evaluation function, in a thread of its own."""

    results: Callable[[], Coroutine[Any, Any, Mapping[str, Mapping[str, Any]]]]
    """Answers and scores every data set."""
    home: asyncio.AbstractEventLoop
    """Where that runs."""

    def run(self) -> RolloutFnEvalOutput:
        """Evaluate, and wait for it."""
        return RolloutFnEvalOutput(asyncio.run_coroutine_threadsafe(self.results(), self.home).result())


_CURRENT: ContextVar[EvaluationCall] = ContextVar("evaluation_call")


def bind(call: EvaluationCall) -> None:
    """Make this the call of the running thread."""
    _CURRENT.set(call)


def current_evaluation() -> EvaluationCall:
    """The call that runs. Raises `RunFailedError` outside of one."""
    call = _CURRENT.get(None)
    if call is None:
        raise RunFailedError(
            "generate_rollout was called for an evaluation where none is being made.",
            next_step="Call it from the function that --eval-function-path names, in the same thread.",
        )
    return call
