"""Engines that were replaced get a version of the weights while the run waits for samples and the trainer is idle."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

RETRY_S = 5.0
"""Seconds after which an engine that could not be brought back is tried again."""


class Returning(Protocol):
    """Knows which engines are behind, and gives them the version that serves."""

    @property
    def behind(self) -> list[str]: ...
    async def someone_is_behind(self) -> None: ...
    async def bring_back(self) -> None: ...


async def engines_brought_back(waiting: Coroutine[Any, Any, _Result], returning: Returning) -> _Result:
    """Await `waiting`, and call `bring_back` meanwhile whenever an engine is behind.

    When `waiting` is over a call under way is finished first, so that nobody else publishes beside it. What
    `bring_back` raises comes out at once; from that last call it is only logged: the next publication meets it again.
    """
    calling = asyncio.Lock()

    async def bring_all_back() -> None:
        while True:
            await returning.someone_is_behind()
            async with calling:
                await returning.bring_back()
            if returning.behind:
                await asyncio.sleep(RETRY_S)

    bringing, working = asyncio.create_task(bring_all_back()), asyncio.create_task(waiting)
    try:
        await asyncio.wait([bringing, working], return_when=asyncio.FIRST_COMPLETED)
        if bringing.done():
            bringing.result()
        result = await working
        async with calling:
            bringing.cancel()
        if bringing.done() and (error := bringing.exception()) is not None:
            logger.warning("engines were not brought back: %s", error)
        return result
    finally:
        for task in (bringing, working):
            task.cancel()
        await asyncio.gather(bringing, working, return_exceptions=True)
