"""Engines that were replaced get a version of the weights while the run waits for samples and the trainer is idle."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

_Result = TypeVar("_Result")

RETRY_S = 5.0
"""Seconds after which an engine that could not be brought back is tried again."""


class Returning(Protocol):
    """Who knows which engines are behind."""

    @property
    def behind(self) -> list[str]: ...
    async def someone_is_behind(self) -> None: ...


_Publisher = TypeVar("_Publisher", bound=Returning)


async def engines_brought_back(
    waiting: Coroutine[Any, Any, _Result], publisher: _Publisher, bring_back: Callable[[_Publisher], Awaitable[None]]
) -> _Result:
    """Await `waiting`, and call `bring_back` meanwhile whenever an engine is behind.

    When `waiting` is over a call under way is finished first, so that nobody else publishes beside it. What
    `bring_back` raises comes out at once.
    """
    calling = asyncio.Lock()

    async def bring_all_back() -> None:
        while True:
            await publisher.someone_is_behind()
            async with calling:
                await bring_back(publisher)
            if publisher.behind:
                await asyncio.sleep(RETRY_S)

    bringing, working = asyncio.create_task(bring_all_back()), asyncio.create_task(waiting)
    try:
        await asyncio.wait([bringing, working], return_when=asyncio.FIRST_COMPLETED)
        if bringing.done():
            bringing.result()
        result = await working
        async with calling:
            bringing.cancel()
        return result
    finally:
        for task in (bringing, working):
            task.cancel()
        await asyncio.gather(bringing, working, return_exceptions=True)
