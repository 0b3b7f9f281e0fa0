"""Which engines get requests, and what happens to requests to those that don't any more, or that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Iterable, Sequence
from typing import TypeVar

from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.protocol import Sampler
from vime.backends.vllm_utils.routed import RoutedClient
from vime.errors import EngineError, EngineUnavailable, GenerationAborted

_Result = TypeVar("_Result")

CHECK_S = 10.0
"""How long an engine may take to say that it is healthy and sample one token, after a request failed."""
GIVE_BACK_S = 1.0
"""How long a group is held back whose engine failed: whoever watches the engines learns of it meanwhile."""

ROUTER_TRIES = 60
"""Looks for a router that failed, `GIVE_BACK_S` apart."""


class ServingEngines:
    """All engines serve until told otherwise.

    Requests of a group go to one engine, by the router's hash of the group's session. Without a router they go to the
    engine with the group's number modulo that of the engines that serve.
    """

    def __init__(
        self,
        engines: Sequence[EngineClient],
        *,
        router: RoutedClient | None = None,
        run_id: str = "",
        are_replaced: bool = False,
    ) -> None:
        """With `are_replaced` a request that failed for its engine's sake is aborted, not failed.

        `run_id` keeps the sessions of several runs at one router apart.
        """
        self._all, self._router, self._run_id = list(engines), router, run_id
        self._are_replaced = are_replaced
        self._serving = list(engines)
        self._num_changes = 0
        self._requests: dict[asyncio.Task[object], str] = {}
        self._check: asyncio.Task[list[str]] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._suspects: set[str] = set()
        self._has_suspects = asyncio.Event()

    def serve(self, addresses: Collection[str]) -> None:
        """Only these engines get requests from now on; requests to others end with `GenerationAborted`.

        Through a router nobody knows which requests those are, and they go on while their engine answers. When it
        doesn't, and nobody will end its process, all requests end that were begun before.
        """
        stopped = [engine for engine in self._serving if engine.address not in addresses]
        serving = [engine for engine in self._all if engine.address in addresses]
        if serving != self._serving:
            self._num_changes += 1
        self._serving = serving
        if self._router is None:
            names = {engine.address for engine in stopped}
            _cancel(task for task, address in self._requests.items() if address in names)
        elif stopped and not self._are_replaced:
            ending = asyncio.create_task(self._end_unless_answering(stopped, list(self._requests)))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    def move(self, address: str, now_at: str) -> None:
        """An engine that serves nothing runs at another address from now on."""
        for engine in self._all:
            if engine.address == address:
                engine.move(now_at)

    def of_group(self, group_index: int) -> Sampler | None:
        """What answers a group's requests; None in a run without engines.

        Raises:
            GenerationAborted: no engine serves.
        """
        if not self._all:
            return None
        if not self._serving:
            raise GenerationAborted("no engine serves")
        if self._router is not None:
            return self._router.session(f"{self._run_id}-{group_index}")
        return self._serving[group_index % len(self._serving)]

    async def request(self, sampler: Sampler | None, work: Coroutine[object, object, _Result]) -> _Result:
        """Await a request, or work that needs none.

        Raises:
            GenerationAborted: the engine serves no more, or failed and is replaced.
        """
        if sampler is None:
            return await work
        num_changes = self._num_changes
        task = asyncio.create_task(work)
        self._requests[task] = sampler.address
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            raise GenerationAborted(f"engine {sampler.address} gets no requests any more") from None
        except EngineUnavailable as error:
            if self._router is not None and not await self._router.answers():
                await self._router_is_back(self._router)
                raise GenerationAborted(f"the router failed: {error.message}") from error
            if not self._are_replaced or not await self._is_an_engines_fault(sampler, num_changes):
                raise
            raise GenerationAborted(f"an engine failed: {error.message}") from error
        finally:
            del self._requests[task]

    async def _router_is_back(self, router: RoutedClient) -> None:
        """Until the router, or who takes its place, answers. Not for ever: its end is told elsewhere."""
        for _ in range(ROUTER_TRIES):
            await asyncio.sleep(GIVE_BACK_S)
            if await router.answers():
                return

    async def suspects(self) -> list[str]:
        """Wait for engines that failed a check after a request had failed; their addresses."""
        await self._has_suspects.wait()
        self._has_suspects.clear()
        found, self._suspects = sorted(self._suspects), set()
        return found

    async def _is_an_engines_fault(self, sampler: Sampler, num_changes: int) -> bool:
        """Whether engines were fenced since `num_changes`, or one that may have had the request can't sample either."""
        await asyncio.sleep(GIVE_BACK_S)
        if self._num_changes != num_changes:
            return True
        if self._check is None or self._check.done():
            self._check = asyncio.create_task(self._failing())
        failing = await asyncio.shield(self._check)
        is_failing = sampler.address in failing if self._router is None else bool(failing)
        return is_failing or self._num_changes != num_changes

    async def _failing(self) -> list[str]:
        """Engines that should serve and fail a check; from now on they are suspects."""
        failing = await _failures(self._serving, [engine.check(CHECK_S) for engine in self._serving])
        if failing:
            self._suspects.update(failing)
            self._has_suspects.set()
        return failing

    async def _end_unless_answering(
        self, stopped: Sequence[EngineClient], begun: Sequence[asyncio.Task[object]]
    ) -> None:
        if not all(await asyncio.gather(*(engine.ready() for engine in stopped))):
            _cancel(begun)


def _cancel(tasks: Iterable[asyncio.Task[object]]) -> None:
    for task in list(tasks):
        task.cancel()


async def _failures(engines: Sequence[EngineClient], checks: Sequence[Coroutine[object, object, None]]) -> list[str]:
    failing = []
    for engine, outcome in zip(list(engines), await asyncio.gather(*checks, return_exceptions=True), strict=True):
        if isinstance(outcome, EngineError):
            failing.append(engine.address)
        elif isinstance(outcome, BaseException):
            raise outcome
    return failing
