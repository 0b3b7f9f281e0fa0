"""Engines that die, stall or fail are noticed, fenced and replaced; the driver's part, which sees no weights."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from vime.errors import EngineError, EngineStartError

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""Restarts of an engine within `RESTART_PERIOD_S` before it is given up; a start that fails counts as one."""
RESTART_PERIOD_S = 3600.0
QUIET_POLL_S = 0.5
"""How often it is asked whether a publication is over."""


@dataclass(frozen=True)
class HealthSettings:
    """When engines are checked, in seconds."""

    interval_s: float
    timeout_s: float
    first_wait_s: float


class KeptEngine(Protocol):
    """An engine's process, which is replaced by another one."""

    name: str

    @property
    def address(self) -> str:
        """Its base URL, another one after a restart on another node."""
        ...

    async def ended(self) -> str:
        """Until the process ends; how it ended."""
        ...

    async def check(self, timeout_s: float) -> None:
        """Return when the engine samples; raises `EngineError` otherwise."""
        ...

    async def stop(self) -> None:
        """End what is left of the process; nothing happens when it has ended."""
        ...

    async def restart(self) -> None:
        """End what is left of the process, and start another one; raises `EngineError` when it doesn't start.

        Its `address` is another one afterwards where it had to go to another node.
        """
        ...


class Fences(Protocol):
    """Who keeps requests and publications from an engine."""

    @property
    def moment(self) -> int | None:
        """Tells moments between publications apart; None while one is under way and engines may stand still."""
        ...

    async def fence(self, address: str, reason: str) -> None:
        """Send no more requests to the engine."""
        ...

    async def give_up(self, address: str) -> None:
        """The engine, which is fenced, never runs again."""
        ...

    async def readmit(self, address: str, now_at: str) -> None:
        """The engine runs anew, `now_at` this address; it gets requests once it has the version that others serve."""
        ...


class EngineKeeper:
    """Watches all engines of a run that are vime's own."""

    def __init__(self, engines: Sequence[KeptEngine], settings: HealthSettings, note: Callable[[str], None]) -> None:
        """`note` is told what a user should know."""
        self._engines, self._settings, self._note = list(engines), settings, note
        self._suspected = {engine.address: asyncio.Event() for engine in engines}
        self._condemned: dict[str, asyncio.Queue[str]] = {engine.address: asyncio.Queue() for engine in engines}
        self._restarted_at: dict[str, list[float]] = {engine.address: [] for engine in engines}

    def suspect(self, address: str) -> None:
        """Check an engine at once."""
        if address in self._suspected:
            self._suspected[address].set()

    def replace(self, address: str, reason: str) -> None:
        """Replace an engine without another check."""
        if address in self._condemned:
            self._condemned[address].put_nowait(reason)

    async def run(self, fences: Fences) -> None:
        """Never returns while an engine is left.

        Raises:
            EngineStartError: every engine has been restarted too often.
        """
        keeping = {asyncio.create_task(self._keep(engine, fences)): engine for engine in self._engines}
        given_up: list[str] = []
        try:
            while keeping:
                done, _ = await asyncio.wait(keeping, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    engine = keeping.pop(task)
                    given_up.append(_why_given_up(engine, task))
                    self._note(given_up[-1])
                    await fences.give_up(engine.address)
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)
        raise EngineStartError(
            f"No engine is left. {' '.join(given_up)}",
            next_step="Look at the engines' logs, then run the same command again; it resumes from the newest commit.",
        )

    async def _keep(self, engine: KeptEngine, fences: Fences) -> None:
        """Raises `EngineError` when the engine is given up."""
        while True:
            address = engine.address
            reason = await self._failure(engine, fences)
            await fences.fence(address, reason)
            await self._restart(engine, reason)
            self._follow(address, engine.address)
            await fences.readmit(address, engine.address)

    def _follow(self, address: str, now_at: str) -> None:
        self._suspected[now_at] = self._suspected.pop(address)
        self._condemned[now_at] = self._condemned.pop(address)
        self._restarted_at[now_at] = self._restarted_at.pop(address)

    async def _failure(self, engine: KeptEngine, fences: Fences) -> str:
        """Until the engine fails; the reason."""
        signs = [
            asyncio.create_task(engine.ended()),
            asyncio.create_task(self._condemned[engine.address].get()),
            asyncio.create_task(self._failing_check(engine, fences)),
        ]
        try:
            done, _ = await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)
            return next(sign.result() for sign in signs if sign in done)
        finally:
            for sign in signs:
                sign.cancel()
            await asyncio.gather(*signs, return_exceptions=True)

    async def _failing_check(self, engine: KeptEngine, fences: Fences) -> str:
        """Until a check fails; why. No check counts that a publication ran into, since engines stand still in one."""
        settings, suspected = self._settings, self._suspected[engine.address]
        wait_s = settings.first_wait_s
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(suspected.wait(), wait_s)
            suspected.clear()
            while (moment := fences.moment) is None:
                await asyncio.sleep(QUIET_POLL_S)
            wait_s = settings.interval_s
            try:
                await engine.check(settings.timeout_s)
            except EngineError as error:
                if fences.moment == moment:
                    return error.message
                wait_s = 0.0

    async def _restart(self, engine: KeptEngine, reason: str) -> None:
        """Raises `EngineError` when the engine has failed too often."""
        address = engine.address
        restarted_at = self._restarted_at[address]
        while True:
            now = time.monotonic()
            restarted_at[:] = [at for at in restarted_at if at > now - RESTART_PERIOD_S]
            if len(restarted_at) >= MAX_RESTARTS:
                await engine.stop()
                raise EngineStartError(f"{reason.rstrip('.')}, after {MAX_RESTARTS} restarts.")
            restarted_at.append(now)
            self._note(
                f"{engine.name} ({address}) failed and gets no requests; restart {len(restarted_at)} of "
                f"{MAX_RESTARTS}. {reason}"
            )
            try:
                await engine.restart()
            except EngineError as error:
                logger.warning("%s did not start again: %s", engine.name, error)
                reason = error.message
                continue
            self._clear(address)
            return

    def _clear(self, address: str) -> None:
        """Forget what was said of the process before."""
        self._suspected[address].clear()
        while not self._condemned[address].empty():
            self._condemned[address].get_nowait()


def _why_given_up(engine: KeptEngine, task: asyncio.Task[None]) -> str:
    """Raises what is no failure of the engine."""
    error = task.exception()
    if not isinstance(error, EngineError):
        task.result()
    assert isinstance(error, EngineError)
    return f"{engine.name} ({engine.address}) is given up: {error.message}"
