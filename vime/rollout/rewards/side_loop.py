"""An event loop in a thread, for the user's coroutines: one that blocks doesn't hold up the loop that asked for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

RESPONSE_S = 1.0
"""A loop that has not turned for so long after a deadline is stuck."""


class SideLoop:
    """Runs coroutines. A loop that one of them has blocked for good is left behind, and the next gets a new one."""

    def __init__(self, name: str) -> None:
        """`name` is that of its thread."""
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """What `work` returns or raises; cancelling this cancels it there."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._started()))

    async def replace_if_stuck(self) -> None:
        """To be called when something ran past its deadline."""
        loop = self._loop
        if loop is None:
            return
        turned = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop))
        done, _ = await asyncio.wait([turned], timeout=RESPONSE_S)
        if not done and self._loop is loop:
            self._loop = None
            loop.call_soon_threadsafe(loop.stop)

    def close(self) -> None:
        """Cancel what runs, and stop; doesn't wait for what blocks."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(_cancel_all, loop)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=[self._loop], name=self._name, daemon=True).start()
        return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.call_soon(loop.stop)
