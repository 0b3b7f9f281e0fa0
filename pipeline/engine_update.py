"""One engine's way through one publication: what is known of it at each moment, and how it ends."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Sequence

from pipeline.weight_transports.transport import CONTROL_SHARE, WORK_SHARE, Deadline, Failures
from vime.backends.vllm_utils.client import EngineClient
from vime.errors import EngineError, PublicationError

SETTLE_S = 10.0
"""Seconds for each call that brings an engine back to work, or to rest, whatever time a publication has left."""


class Weights(enum.Enum):
    """What an engine holds."""

    OLD = "the version before"
    UNKNOWN = "a mix, or nobody knows"
    NEW = "the version that is published"


class EngineUpdate:
    """Steps of one engine. A step that fails is noted, and later ones are left out."""

    def __init__(self, engine: EngineClient, deadline: Deadline, *, in_doubt: bool) -> None:
        """`in_doubt`: an earlier publication has left the engine with a mix, and paused."""
        self.engine, self._deadline = engine, deadline
        self.weights = Weights.UNKNOWN if in_doubt else Weights.OLD
        self.problem = ""
        """Why the engine doesn't take part any more."""
        self.samples = True
        """Whether it is known to sample, as far as nobody has stopped it."""
        self.was_swapped = False
        """Whether it was told to change its weights between two steps."""
        self.was_stopped = False

    @property
    def goes_on(self) -> bool:
        return not self.problem

    @property
    def was_changed(self) -> bool:
        """Whether its steps may have been kept up."""
        return self.was_stopped or self.was_swapped

    def fail(self, problem: str) -> None:
        """Leave out the engine from here on."""
        self.problem = self.problem or problem

    async def stop(self, *, flush: bool) -> None:
        """Stop sampling: freeze running requests, or end them and forget all keys and values."""
        self.samples, self.was_stopped = False, True
        await self._step("pausing", self.engine.pause("abort" if flush else "keep", timeout_s=self._deadline.left_s()))
        if flush and self.goes_on:
            seconds = self._deadline.left_s(CONTROL_SHARE)
            forget = self.engine.reset_prefix_cache(reset_running=True, timeout_s=seconds)
            await self._step("dropping the cache of", forget)

    async def open(self) -> None:
        """Open the update; the model may change after it."""
        await self._step("opening the update on", self.engine.start_weight_update())

    async def can_swap(self) -> bool:
        """Whether a staged version can go into the model without a halt."""
        if self.weights is not Weights.OLD:
            return False
        try:
            asking, seconds = self.engine.swaps(), self._deadline.left_s(CONTROL_SHARE)
            return await self._deadline.bound(f"asking {self.engine.address}", asking, at_most_s=seconds)
        except PublicationError as error:
            self.fail(error.message)
            return False

    async def swap(self, version: int) -> None:
        """Change the weights between two steps; what the engine says of itself counts where the answer is lost."""
        self.was_swapped, self.weights = True, Weights.UNKNOWN
        work = self.engine.swap_weights(version)
        await self._step("changing the weights of", work, share=WORK_SHARE)
        if self.goes_on or await self._version() == version:
            self.problem, self.weights = "", Weights.NEW
        else:
            self.samples = False

    async def close(self, version: int) -> None:
        """Raise the engine's version, and hear that it is raised."""
        if not self.goes_on:
            return
        await self._step("raising the version on", self.engine.finish_weight_update(version))
        # An answer may be lost after the version was raised: what the engine says of itself counts.
        found = await self._version()
        if found == version:
            self.problem, self.weights = "", Weights.NEW
        else:
            self.fail(f"{self.engine.address} reports weight version {found} after the publication of {version}.")

    async def settle(self) -> None:
        """Let an engine whose weights are known sample on; one in doubt ends its requests and stays paused."""
        if self.weights is Weights.UNKNOWN:
            if self.was_swapped:
                await self._quietly(self.engine.pause("abort", timeout_s=SETTLE_S))
            await self._quietly(self.engine.abort_all())
            return
        if self.was_swapped:
            return
        problem = await self._quietly(self.engine.resume())
        self.samples = not problem
        if problem:
            self.fail(f"resuming {self.engine.address}: {problem}")

    async def _version(self) -> int | str:
        try:
            return await asyncio.wait_for(self.engine.weight_version(), SETTLE_S)
        except (EngineError, TimeoutError) as error:
            return f"unknown ({type(error).__name__}: {error})"

    async def _step(self, doing: str, work: Awaitable[object], *, share: float = CONTROL_SHARE) -> None:
        seconds = self._deadline.left_s(share)
        try:
            await self._deadline.bound(f"{doing} {self.engine.address}", work, at_most_s=seconds)
        except PublicationError as error:
            self.fail(error.message)

    async def _quietly(self, work: Awaitable[object]) -> str:
        """Why the call failed; empty when it didn't."""
        try:
            await asyncio.wait_for(work, SETTLE_S)
        except TimeoutError:
            return f"no answer within {SETTLE_S:g} s"
        except EngineError as error:
            return error.message
        return ""


def note_failures(updates: Sequence[EngineUpdate], failures: Failures) -> None:
    """Leave out the engines named."""
    for update in updates:
        if update.engine.address in failures:
            update.fail(failures[update.engine.address])
