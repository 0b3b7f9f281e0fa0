"""How a version that was prepared comes into the models of engines: between two of their steps, or in a halt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from pipeline.engine_update import EngineUpdate, Weights, note_failures
from pipeline.weight_transports.transport import Deadline, Failures, WeightTransport, failures_of, on_each
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.updates import CompareHeld, RememberHeld
from vime.errors import PublicationError
from vime.utils.kill_points import KillPoint, reach

logger = logging.getLogger(__name__)

ASK_PAUSE_S = 5.0


class WeightChange:
    """Changes models; every engine is left on the version, as it was, or in doubt and at rest, as its update tells."""

    def __init__(self, transport: WeightTransport, *, compare_first: bool = False) -> None:
        """`compare_first`: the first version must leave the engines with exactly the weights they were started with."""
        self._transport, self._compare_first = transport, compare_first

    async def who_swaps(self, serving: Sequence[EngineUpdate], *, flush: bool) -> list[EngineUpdate]:
        """Of engines that serve, so that nobody has left them paused: those that need no halt."""
        if flush or self._compare_first or not self._transport.stages:
            return []
        can_swap = await asyncio.gather(*(update.can_swap() for update in serving))
        return [update for update, can in zip(serving, can_swap, strict=True) if can]

    async def apply(
        self,
        version: int,
        swapping: Sequence[EngineUpdate],
        halting: Sequence[EngineUpdate],
        deadline: Deadline,
        *,
        flush: bool,
    ) -> None:
        """Change the engines' weights, all at once; both ways go to their end, whatever becomes of the other.

        Raises:
            PublicationError: a comparison of weights failed.
        """
        ways: list[Coroutine[Any, Any, None]] = []
        if swapping:
            ways.append(self._swap(version, swapping))
        if halting:
            ways.append(self._halt_and_load(version, halting, deadline, flush=flush))
        for outcome in await asyncio.gather(*ways, return_exceptions=True):
            if outcome is not None:
                raise outcome

    async def _swap(self, version: int, swapping: Sequence[EngineUpdate]) -> None:
        """Change the weights between two steps."""
        try:
            await asyncio.gather(*(update.swap(version) for update in swapping))
            reach(KillPoint.DURING_WEIGHTS)
        finally:
            await asyncio.gather(*(update.settle() for update in swapping))

    async def _halt_and_load(
        self, version: int, halting: Sequence[EngineUpdate], deadline: Deadline, *, flush: bool
    ) -> None:
        """Stop, load, raise the version, and let go on."""
        try:
            await asyncio.gather(*(update.stop(flush=flush) for update in halting))
            if self._compare_first:
                await _hold(halting, deadline, RememberHeld())
            await asyncio.gather(*(update.open() for update in halting if update.goes_on))
            loading = [update for update in halting if update.goes_on]
            for update in loading:
                update.weights = Weights.UNKNOWN
            note_failures(loading, await self._load(version, [update.engine for update in loading], deadline))
            reach(KillPoint.DURING_WEIGHTS)
            await asyncio.gather(*(update.close(version) for update in loading))
            if self._compare_first:
                await _hold(loading, deadline, CompareHeld())
                self._compare_first = False
        finally:
            await asyncio.gather(*(update.settle() for update in halting))

    async def _load(self, version: int, engines: Sequence[EngineClient], deadline: Deadline) -> Failures:
        try:
            return await deadline.bound("loading", self._transport.load(version, engines, deadline))
        except PublicationError as error:
            return failures_of(error, engines)


async def pause_s(updates: Sequence[EngineUpdate], change_s: float, deadline: Deadline) -> float:
    """The longest time that an engine stood still; that of the change, where an engine was halted or doesn't tell."""
    if not all(update.was_swapped and update.weights is Weights.NEW for update in updates if update.was_changed):
        return change_s
    engines = [update.engine for update in updates if update.was_changed]
    try:
        asking = asyncio.gather(*(engine.swap_time_s() for engine in engines))
        return max(await deadline.bound("asking for the pause", asking, at_most_s=ASK_PAUSE_S), default=0.0)
    except PublicationError as error:
        logger.warning("the pause of the engines is not known: %s", error.message)
        return change_s


async def _hold(updates: Sequence[EngineUpdate], deadline: Deadline, request: RememberHeld | CompareHeld) -> None:
    """Raises `PublicationError` when an engine can't note its weights, or holds others than it noted."""
    engines = [update.engine for update in updates if update.goes_on]

    async def ask(engine: EngineClient) -> None:
        await engine.start_weight_update()
        await engine.update_weights(request)

    failures = await on_each(engines, "comparing the weights of", [ask(engine) for engine in engines], deadline)
    if failures:
        raise PublicationError(
            f"--check-weight-update-equal: {'; '.join(failures.values())}",
            next_step="Check that --hf-checkpoint is what the trainer was started from, in the engine's dtype.",
            engines=failures,
        )
