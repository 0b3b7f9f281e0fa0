"""A generate function's link to the run: the engine requests that it makes for one sample."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from vime.errors import GenerationAborted, SampleError
from vime.rollout.sampling import SamplingSettings
from vime.utils.types import Sample

Ask = Callable[[Sample, SamplingSettings], Awaitable[None]]
"""Adds one engine request's tokens to a sample."""


@dataclass(frozen=True)
class SampleCall:
    """One call of a generate function."""

    ask: Ask
    home: asyncio.AbstractEventLoop
    """Where `ask` runs."""
    sampling: SamplingSettings
    evaluation: bool
    answers: list[tuple[Sample, int, Sequence[int]]] = field(default_factory=list)
    """(sample, position, token ids) of what engines answered."""

    async def continue_sample(self, sample: Sample, sampling: SamplingSettings) -> None:
        """Add the tokens of one request; a sample whose request was aborted gets the status ABORTED."""
        start = len(sample.tokens)
        work: Any = self.ask(sample, sampling)
        try:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.home))
        except GenerationAborted:
            sample.status = Sample.Status.ABORTED
        start = start or sample.prompt_length
        self.answers.append((sample, start, tuple(sample.tokens[start:])))

    def num_drifted(self) -> int:
        """Tokens of the engines' that are others now: their log-probabilities are not about them."""
        return sum(
            token != found
            for sample, start, ids in self.answers
            for token, found in zip(ids, sample.tokens[start:], strict=False)
        )


_CURRENT: ContextVar[SampleCall] = ContextVar("sample_call")


def bind(call: SampleCall) -> None:
    """Make this the call of the running task and of those that it starts."""
    _CURRENT.set(call)


def current_call() -> SampleCall:
    """The call that runs. Raises `SampleError` outside of one."""
    call = _CURRENT.get(None)
    if call is None:
        raise SampleError(
            "generate was called where no sample is being made.",
            next_step="Call it from a function that --custom-generate-function-path names, or from a task of it.",
            reason="generate_raised",
        )
    return call
