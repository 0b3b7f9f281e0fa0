"""A generate function's link to the run: the engine requests that it makes for one sample."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vime.errors import GenerationAborted, SampleError
from vime.rollout.current_call import CurrentCall
from vime.rollout.generate import HandOver
from vime.rollout.sampling import SamplingSettings
from vime.utils.types import Sample


class Ask(Protocol):
    """Adds one engine request's tokens to a sample; with `hand_over` in pieces, awaiting it after each."""

    def __call__(
        self, sample: Sample, sampling: SamplingSettings, hand_over: HandOver | None = None, /
    ) -> Coroutine[Any, Any, None]: ...


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
    streams: set[concurrent.futures.Future[None]] = field(default_factory=set)
    """Requests whose tokens come in pieces."""

    async def continue_sample(self, sample: Sample, sampling: SamplingSettings) -> None:
        """Add the tokens of one request; a sample whose request was aborted gets the status ABORTED."""
        start = len(sample.tokens)
        try:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.ask(sample, sampling), self.home))
        except GenerationAborted:
            sample.status = Sample.Status.ABORTED
        self._note_answer(sample, start)

    async def continue_in_pieces(self, sample: Sample, sampling: SamplingSettings) -> AsyncGenerator[Sample]:
        """As `continue_sample`, yielding the sample after each piece. Closing it ends the request.

        The sample changes only while the next piece is waited for.
        """
        shown: asyncio.Queue[None] = asyncio.Queue()
        here, wanted = asyncio.get_running_loop(), asyncio.Event()

        async def hand_over() -> None:
            wanted.clear()
            here.call_soon_threadsafe(shown.put_nowait, None)
            await wanted.wait()

        start = len(sample.tokens)
        asking = asyncio.run_coroutine_threadsafe(self.ask(sample, sampling, hand_over), self.home)
        self.streams.add(asking)
        asking.add_done_callback(lambda _: here.call_soon_threadsafe(shown.put_nowait, None))
        try:
            while True:
                await shown.get()
                if asking.done():
                    break
                self._note_answer(sample, start)
                start = len(sample.tokens)
                yield sample
                self.home.call_soon_threadsafe(wanted.set)
            asking.result()
        except GenerationAborted:
            sample.status = Sample.Status.ABORTED
        finally:
            asking.cancel()

    def end_streams(self) -> None:
        """End the requests that a function left without closing them."""
        for stream in self.streams:
            stream.cancel()

    def num_drifted(self) -> int:
        """Tokens of the engines' that are others now: their log-probabilities are not about them."""
        return sum(
            token != found
            for sample, start, ids in self.answers
            for token, found in zip(ids, sample.tokens[start:], strict=False)
        )

    def _note_answer(self, sample: Sample, start: int) -> None:
        start = start or sample.prompt_length
        self.answers.append((sample, start, tuple(sample.tokens[start:])))


_CURRENT = CurrentCall[SampleCall](
    "sample_call",
    lambda: SampleError(
        "generate was called where no sample is being made.",
        next_step="Call it from a function that --custom-generate-function-path names, or from a task of it.",
        reason="generate_raised",
    ),
)
bind, current_call = _CURRENT.bind, _CURRENT.get
