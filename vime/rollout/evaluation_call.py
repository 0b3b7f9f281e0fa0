"""An evaluation function's link to the run: vime's own evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from vime.errors import RunFailedError
from vime.rollout.base_types import RolloutFnEvalOutput
from vime.rollout.current_call import CurrentCall


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


_CURRENT = CurrentCall[EvaluationCall](
    "evaluation_call",
    lambda: RunFailedError(
        "generate_rollout was called for an evaluation where none is being made.",
        next_step="Call it from the function that --eval-function-path names, in the same thread.",
    ),
)
bind, current_evaluation = _CURRENT.bind, _CURRENT.get
