"""Which engines get requests, and the end of requests to those that don't any more."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from typing import TypeVar

from vime.backends.vllm_utils.client import EngineClient
from vime.errors import GenerationAborted

_Result = TypeVar("_Result")


class ServingEngines:
    """All engines serve until told otherwise."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        self._all = list(engines)
        self._serving = list(engines)
        self._requests: dict[asyncio.Task[object], str] = {}

    def serve(self, addresses: Collection[str]) -> None:
        """Only these engines get requests from now on; requests to others end with `GenerationAborted`."""
        self._serving = [engine for engine in self._all if engine.address in addresses]
        for task, address in self._requests.items():
            if address not in addresses:
                task.cancel()

    def of_group(self, group_index: int) -> EngineClient | None:
        """The engine of a group: the same as long as the same engines serve; None in a run without engines."""
        return self._serving[group_index % len(self._serving)] if self._all else None

    async def request(self, engine: EngineClient | None, work: Coroutine[object, object, _Result]) -> _Result:
        """Await a request to an engine, or work that needs none.

        Raises:
            GenerationAborted: the engine serves no more.
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
        finally:
            del self._requests[task]
