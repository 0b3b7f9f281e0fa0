"""When requests to engines may start, under which policy version, and at which engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from pipeline.serving_engines import ServingEngines
from pipeline.stopwatch import Stopwatch
from vime.backends.vllm_utils.protocol import Sampler

_Result = TypeVar("_Result")


class RequestGate:
    """Closed until it is resumed for the first time. Whatever asks an engine goes through it, and is counted."""

    def __init__(self, engines: ServingEngines) -> None:
        """Without engines, work gets None in place of one."""
        self.engines = engines
        self._open = asyncio.Event()
        self._idle = Stopwatch()
        self._started: float | None = None
        self._is_ending = False
        self.policy_version = 0
        """Version under which requests start now."""
        self._num_requests = self._num_busy = 0

    @property
    def num_requests(self) -> int:
        """Requests in flight; a generate function that runs counts as one where it sends its requests by itself."""
        return max(self._num_requests, self._num_busy)

    @property
    def is_open(self) -> bool:
        """Whether requests may start."""
        return self._open.is_set()

    def pause(self) -> None:
        """Start no request until `resume`; running ones go on."""
        if not self._is_ending:
            self._open.clear()

    def resume(self, policy_version: int, serving: Collection[str] | None = None) -> None:
        """Requests start under `policy_version`, at the engines with the addresses `serving` (None: at all)."""
        self.policy_version = policy_version
        if serving is not None:
            self.engines.serve(serving)
        if self._started is None:
            self._started = time.monotonic()
            self._idle.set(True)
        self._open.set()

    def serve_only(self, serving: Collection[str]) -> None:
        """Send requests to the engines at these addresses alone; if there are none, not before `resume`."""
        self.engines.serve(serving)
        if not serving:
            self.pause()

    def open_to_end(self) -> None:
        """Hold nobody up any more, whatever pauses come, since nothing will begin."""
        self._is_ending = True
        self._open.set()

    async def opened(self) -> None:
        """Wait until requests may start; when this returns, they may."""
        while not self._open.is_set():  # it may be shut again between the event and its waiter's turn
            await self._open.wait()

    async def request(
        self, group_index: int, work: Callable[[Sampler | None, int], Coroutine[object, object, _Result]]
    ) -> _Result:
        """Await `work(engine, policy_version)` for a sample of a group, once requests may start.

        Raises:
            GenerationAborted: the engine serves no more.
        """
        await self.opened()
        engine = self.engines.of_group(group_index)
        with self._counted("_num_requests"):
            return await self.engines.request(engine, work(engine, self.policy_version))

    def busy(self) -> AbstractContextManager[None]:
        """While a generate function of the user's own runs, which may send requests past the gate."""
        return self._counted("_num_busy")

    def idle_s(self) -> float:
        """Seconds in which no request was in flight, since the gate was first resumed."""
        return self._idle.total_s()

    def wall_s(self) -> float:
        """Seconds since the gate was first resumed."""
        return 0.0 if self._started is None else time.monotonic() - self._started

    @contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        vars(self)[name] += 1
        self._idle.set(False)
        try:
            yield
        finally:
            vars(self)[name] -= 1
            self._idle.set(self.num_requests == 0)
