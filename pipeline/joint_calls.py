"""Calls that wait at the same time become one call, so that they share what it costs to make a change durable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Generic, TypeVar

from vime.errors import VimeError

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


class JointCalls(Generic[_Item, _Answer]):
    """Works on the items of all calls that arrived while the event loop was busy. For one event loop at a time."""

    def __init__(self, work: Callable[[Sequence[_Item]], Sequence[_Answer]]) -> None:
        """`work` gives one answer for each item, in order; a call whose items it answered may be repeated."""
        self._work = work
        self._calls: list[Sequence[_Item]] = []
        self._turn: asyncio.Task[list[list[_Answer] | VimeError]] | None = None

    async def call(self, items: Sequence[_Item]) -> list[_Answer]:
        """The answers to `items`. Raises what the work raises for these items, whatever other calls ask."""
        if self._turn is None:
            self._turn = asyncio.create_task(self._take_turn())
        number = len(self._calls)
        self._calls.append(items)
        outcome = (await asyncio.shield(self._turn))[number]
        if isinstance(outcome, VimeError):
            raise outcome
        return outcome

    async def _take_turn(self) -> list[list[_Answer] | VimeError]:
        calls, self._calls, self._turn = self._calls, [], None
        try:
            answers = iter(self._work([item for items in calls for item in items]))
        except VimeError as error:
            return [error] if len(calls) == 1 else [self._alone(items) for items in calls]
        return [list(islice(answers, len(items))) for items in calls]

    def _alone(self, items: Sequence[_Item]) -> list[_Answer] | VimeError:
        try:
            return list(self._work(items))
        except VimeError as error:
            return error
