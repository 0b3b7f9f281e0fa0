"""The producers as one: started together, called together, and replaced one by one when their processes die."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from pipeline.cluster import CONTROL_S, answer
from pipeline.restarts import RestartBudget
from vime.errors import ProcessDiedError, StalledError

START_S = 600.0
"""How long a producer may take to load what it needs."""
REPLACE_S = 2 * START_S
"""How long a call waits for the successor of a producer that died."""


class ProducerGroup:
    """Handles of all producers.

    A successor takes up the number of its predecessor, whose leases go back to the queue first, and is let on as far as
    the others are.
    """

    def __init__(
        self,
        spawn: Callable[[int], Any],
        end: Callable[[Any], None],
        retire: Callable[[int], Awaitable[None]],
        note: Callable[[str], None],
        on_restart: Callable[[], Awaitable[None]],
        *,
        max_restarts: int,
    ) -> None:
        """`spawn(number)` starts an actor, `end` kills one, `retire(number)` takes back what that producer leased.

        `note` is told what a user should know, `on_restart` is called after each restart. Each producer may be
        restarted `max_restarts` times in an hour.
        """
        self._spawn, self._end, self._retire = spawn, end, retire
        self._note, self._on_restart, self._max_restarts = note, on_restart, max_restarts
        self.actors: list[Any] = []
        self._admitted: tuple[int, list[str]] | None = None
        """Policy version and engines under which requests may start; None while none may."""
        self._moves: list[tuple[str, str]] = []
        """Engines that went from one address to another, in turn."""
        self._stopping = False
        self._changed = asyncio.Condition()

    async def start(self, count: int) -> None:
        """Start the producers; they generate nothing before admission is resumed."""
        self.actors = [self._spawn(number) for number in range(count)]
        await asyncio.gather(
            *(answer(actor.start.remote(), name_of(n), within_s=START_S) for n, actor in enumerate(self.actors))
        )

    async def keep(self, number: int) -> None:
        """Until the producer has stopped; one that had died before, and has no successor yet, counts as stopped.

        Raises:
            ProcessDiedError: its process died too often, or while it was to stop.
            VimeError: what it failed with by itself; that would come again.
        """
        budget = RestartBudget(self._max_restarts)
        while True:
            try:
                await answer(self.actors[number].run.remote(), name_of(number))
                return
            except ProcessDiedError as error:
                if not await self._replace(number, budget, error):
                    return

    async def ask(self, number: int, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """A producer's answer, of its successor where it dies before."""
        while True:
            actor = self.actors[number]
            try:
                return await answer(call(actor), name_of(number))
            except ProcessDiedError:
                await self._successor(number, actor)

    async def ask_all(self, call: Callable[[Any], Awaitable[Any]]) -> list[Any]:
        """The answers of all that live."""
        asked = [answer(call(actor), name_of(n), within_s=CONTROL_S) for n, actor in enumerate(self.actors)]
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, ProcessDiedError):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    async def pause_admission(self) -> None:
        """No request starts; one who died starts none either."""
        self._admitted = None
        await self.ask_all(lambda producer: producer.pause_admission.remote())

    async def resume_admission(self, policy_version: int, serving: Sequence[str]) -> None:
        """Requests start under `policy_version` at the engines `serving`."""
        self._admitted = policy_version, list(serving)
        await self.ask_all(lambda producer: producer.resume_admission.remote(policy_version, list(serving)))

    async def serve_only(self, serving: Sequence[str]) -> None:
        """Requests go to these engines alone; where there are none, not before admission is resumed."""
        if self._admitted is not None:
            self._admitted = (self._admitted[0], list(serving)) if serving else None
        await self.ask_all(lambda producer: producer.serve_only.remote(list(serving)))

    async def engine_moved(self, address: str, now_at: str) -> None:
        """An engine that serves nothing runs at another address from now on."""
        self._moves.append((address, now_at))
        await self.ask_all(lambda producer: producer.engine_moved.remote(address, now_at))

    async def ask_to_stop(self) -> None:
        """Finished groups are published, unfinished ones go back; `keep` then returns."""
        self._stopping = True
        await self.ask_all(lambda producer: producer.stop.remote())

    async def _replace(self, number: int, budget: RestartBudget, death: ProcessDiedError) -> bool:
        """Whether there is a successor: one that is not up before the stop has nothing to do, and ends.

        Raises `death`, or that of a successor, when no restart is left.
        """
        while True:
            which = None if self._stopping else budget.take()
            if which is None:
                raise death
            self._note(f"Producer {number} died and is replaced, {which}. {death.message}")
            self._end(self.actors[number])
            await self._retire(number)
            num_moves, successor = len(self._moves), self._spawn(number)
            try:
                await answer(successor.start.remote(), name_of(number), within_s=START_S)
                break
            except ProcessDiedError as error:
                if self._stopping:
                    break
                death = error
        if self._stopping:
            self._end(successor)
            return False
        async with self._changed:
            self.actors[number] = successor
            missed = [successor.engine_moved.remote(*move) for move in self._moves[num_moves:]]
            if self._admitted is not None:
                missed.append(successor.resume_admission.remote(*self._admitted))
            self._changed.notify_all()
        with suppress(ProcessDiedError):  # it is replaced in its turn
            for call in missed:
                await answer(call, name_of(number), within_s=CONTROL_S)
        await self._on_restart()
        return True

    async def _successor(self, number: int, actor: Any) -> None:
        """Raises `StalledError` when there is none in time."""
        try:
            async with asyncio.timeout(REPLACE_S), self._changed:
                await self._changed.wait_for(lambda: self.actors[number] is not actor)
        except TimeoutError as error:
            raise StalledError(
                f"Nobody has taken the place of producer {number} for {REPLACE_S:.0f} s after it died.",
                next_step="Run the same command again; it resumes from the newest commit.",
            ) from error


def name_of(number: int) -> str:
    """A producer in messages."""
    return f"producer {number}"
