"""One engine's actor as the driver sees it, replaced by another one at a restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from pipeline.cluster import CONTROL_S, answer
from pipeline.messages import Takeover, decode
from vime.backends.vllm_utils.client import EngineClient
from vime.errors import EngineStartError, RunFailedError, StorageError

logger = logging.getLogger(__name__)

START_S = 780.0
"""What an engine and its actor may take to start, while nothing has to end: the engine has a shorter limit there."""
TAKE_OVER_S = 240.0
"""What an actor may take to take over an engine that needn't be ended."""
STOP_MARGIN_S = 15.0
"""What an actor may take to stop an engine beyond the time that the engine has for it."""


class EngineProcess:
    """An engine, whichever process serves it: at one address, unless it has to go to another node."""

    def __init__(
        self,
        name: str,
        model: str,
        spawn: Callable[[], Any],
        end: Callable[[Any], None],
        *,
        cleanup_timeout_s: float,
        log_tail: Callable[[], list[str]],
        on_restart: Callable[[], Awaitable[None]],
        node: Callable[[], str],
        leave_lost_node: Callable[[], Awaitable[None]],
        is_kept: bool = False,
    ) -> None:
        """An engine of `model`. `spawn` starts an actor, `end` kills one; with `is_kept` the engine outlives both.

        `log_tail` are the last lines that the engine wrote; `on_restart` is called after each restart.
        `node` is the id of the node on which `spawn` starts one, another one after `leave_lost_node` where it is gone.
        """
        self.name, self.model, self._spawn, self._end = name, model, spawn, end
        self.is_kept = is_kept
        self._cleanup_timeout_s, self._log_tail, self._on_restart = cleanup_timeout_s, log_tail, on_restart
        self._node, self._leave_lost_node, self._started_on = node, leave_lost_node, node()
        self.actor = spawn()
        self._is_stopped = False
        self.is_taken_over = False
        """Whether its process is that of a driver before."""
        self.address = ""

    async def start(self) -> str:
        """Start the engine and wait until it answers; its address. Raises `EngineStartError`."""
        self.address = await self._started(0)
        return self.address

    async def take_over(self) -> Takeover:
        """Take over the engine that outlived a driver before, or end it, before `start`."""
        within_s = TAKE_OVER_S + self._cleanup_timeout_s
        taken: bytes = await answer(
            self.actor.take_over.remote(), self.name, within_s=within_s, doing="say whether it goes on"
        )
        takeover = decode(taken, Takeover)
        self.is_taken_over = takeover.version is not None
        return takeover

    async def progress(self) -> str:
        """What its start is at, in words."""
        phase: str = await answer(self.actor.progress.remote(), self.name, within_s=CONTROL_S)
        return phase

    async def ended(self) -> str:
        """Until the engine's process ends; how, and the last lines of its log."""
        try:
            how = f"Its process ended with status {await answer(self.actor.watch.remote(), self.name)}."
        except RunFailedError as error:
            how = error.message
        return how + "".join(f"\n  | {line}" for line in self._log_tail())

    async def check(self, timeout_s: float) -> None:
        """Return when the engine has sampled a token; raises `EngineError` when it doesn't within `timeout_s`."""
        async with EngineClient(self.address) as client:
            await client.check(timeout_s)

    async def restart(self) -> None:
        """End the actor and its engine, and start others; raises `EngineStartError`.

        They have the same address, or another one where the node is lost.
        """
        await self.stop()
        try:
            await self._leave_lost_node()
            moves = self._node() != self._started_on
            self.actor, self._is_stopped = self._spawn(), False
            started = await self._started(0 if moves else urlsplit(self.address).port or 0)
        except (RunFailedError, StorageError) as error:
            raise EngineStartError(error.message) from error
        if started != self.address and not moves:
            raise EngineStartError(f"{self.name} started at {started}, expected {self.address}.")
        self.address, self._started_on = started, self._node()
        await self._on_restart()

    async def _started(self, port: int) -> str:
        """Its address. An engine before it may have to end first, and it itself where it isn't ready in time."""
        within_s = START_S + 2 * self._cleanup_timeout_s
        address: str = await answer(self.actor.start.remote(port), self.name, within_s=within_s, doing="start")
        return address

    async def pids(self) -> list[int]:
        """The actor's process and the engine's; none when the actor has ended."""
        try:
            found: list[int] = await answer(self.actor.pids.remote(), self.name, within_s=CONTROL_S)
        except RunFailedError:
            return []
        return found

    async def stop(self) -> None:
        """End the actor and its engine; what doesn't stop in order ends with its actor."""
        if self._is_stopped:
            return
        try:
            stopping = answer(self.actor.stop.remote(), self.name)
            await asyncio.wait_for(stopping, self._cleanup_timeout_s + STOP_MARGIN_S)
        except (RunFailedError, TimeoutError) as error:
            logger.warning("%s was not stopped in order: %s", self.name, error)
        self._end(self.actor)
        self._is_stopped = True
