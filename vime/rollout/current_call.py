"""How vime's own functions find the call of a user's function that they are used in."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Generic, TypeVar

from vime.errors import VimeError

_Call = TypeVar("_Call")


class CurrentCall(Generic[_Call]):
    """The call that the running thread, or task and those that it starts, work on."""

    def __init__(self, name: str, outside: Callable[[], VimeError]) -> None:
        """`outside` makes the error for code that asks where there is no call."""
        self._current: ContextVar[_Call] = ContextVar(name)
        self._outside = outside

    def bind(self, call: _Call) -> None:
        """Make this the current call."""
        self._current.set(call)

    def get(self) -> _Call:
        """The call that runs. Raises what `outside` makes where there is none."""
        call = self._current.get(None)
        if call is None:
            raise self._outside()
        return call
