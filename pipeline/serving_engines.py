"""Which engines get requests, and what happens to requests to those that don't any more, or that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from typing import TypeVar

from vime.backends.vllm_utils.client import EngineClient
from vime.errors import EngineError, EngineUnavailable, GenerationAborted

_Result = TypeVar("_Result")

CHECK_S = 10.0
"""How long an engine may take to say that it is healthy and sample one token, after a request failed."""
GIVE_BACK_S = 1.0
"""How long a group is held back whose engine failed: whoever watches the engines learns of it meanwhile."""


class ServingEngines:
    """All engines serve until told otherwise."""

    def __init__(self, engines: Sequence[EngineClient], *, are_replaced: bool = False) -> None:
        """With `are_replaced` a request that failed for its engine's sake is aborted, not failed."""
        self._all, self._are_replaced = list(engines), are_replaced
        self._serving = list(engines)
        self._requests: dict[asyncio.Task[object], str] = {}
        self._check: asyncio.Task[list[str]] | None = None
        self._suspects: set[str] = set()
        self._has_suspects = asyncio.Event()

    def serve(self, addresses: Collection[str]) -> None:
        """Only these engines get requests from now on; requests to others end with `GenerationAborted`."""
        self._serving = [engine for engine in self._all if engine.address in addresses]
        for task, address in self._requests.items():
            if address not in addresses:
                task.cancel()

    def of_group(self, group_index: int) -> EngineClient | None:
        """The engine of a group: the same as long as the same engines serve; None in a run without engines.

        Raises:
            GenerationAborted: no engine serves.
        """
        if not self._all:
            return None
        if not self._serving:
            raise GenerationAborted("no engine serves")
        return self._serving[group_index % len(self._serving)]

    async def request(self, engine: EngineClient | None, work: Coroutine[object, object, _Result]) -> _Result:
        """Await a request to an engine, or work that needs none.

        Raises:
            GenerationAborted: the engine serves no more, or failed and is replaced.
        """
        if engine is None:
            return await work
        task = asyncio.create_task(work)
        self._requests[task] = engine.address
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            raise GenerationAborted(f"engine {engine.address} gets no requests any more") from None
        except EngineUnavailable as error:
            if not self._are_replaced or not await self._is_the_engines_fault(engine):
                raise
            raise GenerationAborted(f"an engine failed: {error.message}") from error
        finally:
            del self._requests[task]

    async def suspects(self) -> list[str]:
        """Wait for engines that failed a request and a check after it; their addresses."""
        await self._has_suspects.wait()
        self._has_suspects.clear()
        found, self._suspects = sorted(self._suspects), set()
        return found

    async def _is_the_engines_fault(self, engine: EngineClient) -> bool:
        """Whether the engine serves no more, or can't sample a token either."""
        await asyncio.sleep(GIVE_BACK_S)
        if engine not in self._serving:
            return True
        if self._check is None or self._check.done():
            self._check = asyncio.create_task(self._failing())
        return engine.address in await asyncio.shield(self._check) or engine not in self._serving

    async def _failing(self) -> list[str]:
        """Engines that should serve and fail a check; from now on they are suspects."""
        engines = list(self._serving)
        outcomes = await asyncio.gather(*(engine.check(CHECK_S) for engine in engines), return_exceptions=True)
        failing = []
        for engine, outcome in zip(engines, outcomes, strict=True):
            if isinstance(outcome, EngineError):
                failing.append(engine.address)
            elif isinstance(outcome, BaseException):
                raise outcome
        if failing:
            self._suspects.update(failing)
            self._has_suspects.set()
        return failing
