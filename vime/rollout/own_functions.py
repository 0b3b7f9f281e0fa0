"""Functions of the user's own around a sample: called in a loop of their own, with their errors as the sample's."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from vime.errors import EngineError, FailedSampleError, SampleError, SettingsError
from vime.rollout.rewards.own_functions import is_async
from vime.rollout.rewards.side_loop import SideLoop
from vime.settings.import_paths import load_function


class OwnFunctions:
    """Loads and calls functions. One that blocks holds up other functions, but neither heartbeats nor publications."""

    def __init__(self) -> None:
        self._side = SideLoop("own functions")

    def close(self) -> None:
        """Cancel what runs."""
        self._side.close()

    async def call(self, flag: str, path: str, where: str, reason: str, *args: Any, **keywords: Any) -> Any:
        """What the function at `path` returns; `where` and `reason` name the sample and the kind of its failure.

        Raises:
            SampleError: it can't be loaded, or raised.
            FailedSampleError, EngineError: as the function let them through.
        """
        function = loaded(flag, path, where, reason)
        return await self.run(_called(function, args, keywords), f"{flag} {path}", where, reason)

    async def run(self, work: Any, what: str, where: str, reason: str) -> Any:
        """Await a coroutine of the user's over there. Raises as `call`."""
        try:
            return await self._side.run(work)
        except asyncio.CancelledError as error:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            raise SampleError(f"{where}: something that {what} awaited was cancelled.", reason=reason) from error
        except (EngineError, FailedSampleError):
            raise
        except Exception as error:  # the boundary to user code: whatever it raises becomes the sample's reason
            raise SampleError(f"{where}: {what} raised {type(error).__name__}: {error}.", reason=reason) from error


def loaded(flag: str, path: str, where: str, reason: str) -> Callable[..., Any]:
    """The function at an import path. Raises `SampleError`."""
    try:
        return load_function(flag, path)
    except SettingsError as error:
        raise SampleError(f"{where}: {error.message}", next_step=error.next_step, reason=reason) from error


@cache
def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function can be called with a keyword argument of this name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False  # built in C: its arguments can't be known
    return any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD
        or (parameter.name == name and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY)
        for parameter in parameters
    )


async def _called(function: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    return await function(*args, **keywords) if is_async(function) else function(*args, **keywords)
