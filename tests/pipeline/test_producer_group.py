"""Producers whose processes die are replaced; those that fail by themselves are not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.producer_group import ProducerGroup
from vime.errors import DataError, ProcessDiedError


class Actor:
    """A producer's process: it starts when it may, runs until a test ends it, and every other call is noted."""

    def __init__(self, calls: list[str], may_start: asyncio.Event) -> None:
        self._may_start = may_start
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.dead = False
        names = ("start", "pause_admission", "resume_admission", "serve_only", "stop", "stats", "evaluate")
        for name in (*names, "engine_moved"):
            setattr(self, name, SimpleNamespace(remote=self._noting(name, calls)))
        self.run = SimpleNamespace(remote=self._run)

    def die(self) -> None:
        self.dead = True
        self.end.set_exception(ProcessDiedError("killed"))

    async def _run(self) -> None:
        await self.end

    def _noting(self, name: str, calls: list[str]) -> Any:
        async def call(*given: object) -> str:
            if self.dead:
                raise ProcessDiedError("killed")
            calls.append(" ".join([name, *map(str, given)]))
            if name == "start":
                await self._may_start.wait()
            if self.dead:
                raise ProcessDiedError("killed")
            return name

        return call


class Group:
    """One producer, and what became of it."""

    def __init__(self, max_restarts: int = 2) -> None:
        self.calls: list[str] = []
        self.notes: list[str] = []
        self.retired: list[int] = []
        self.spawned: list[Actor] = []
        self.ended: list[Actor] = []
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.group = ProducerGroup(
            self._spawn,
            self.ended.append,
            self._retire,
            self.notes.append,
            lambda: asyncio.sleep(0),
            max_restarts=max_restarts,
        )

    def _spawn(self, _number: int) -> Actor:
        self.spawned.append(Actor(self.calls, self.may_start))
        return self.spawned[-1]

    async def _retire(self, number: int) -> None:
        self.retired.append(number)

    async def start(self) -> asyncio.Task[None]:
        await self.group.start(1)
        return asyncio.create_task(self.group.keep(0))

    @property
    def actor(self) -> Actor:
        found: Actor = self.group.actors[0]
        return found


async def test_a_dead_producer_is_replaced_its_leases_go_back_and_its_successor_is_let_on_as_it_was() -> None:
    rig = Group()
    keeping = await rig.start()
    await rig.group.resume_admission(7, ["e0"])
    first = rig.actor
    rig.calls.clear()
    first.die()
    assert await rig.group.ask(0, lambda producer: producer.evaluate.remote()) == "evaluate"
    assert rig.actor is not first
    assert rig.retired == [0]
    rig.actor.end.set_result(None)
    await keeping
    assert rig.calls == ["start", "resume_admission 7 ['e0']", "evaluate"]
    assert rig.notes == ["Producer 0 died and is replaced, restart 1 of 2. killed"]


async def test_calls_to_all_leave_out_one_that_is_dead_and_a_pause_holds_for_its_successor() -> None:
    rig = Group()
    keeping = await rig.start()
    await rig.group.resume_admission(7, ["e0"])
    first = rig.actor
    first.dead = True
    assert await rig.group.ask_all(lambda producer: producer.stats.remote()) == []
    await rig.group.pause_admission()
    rig.calls.clear()
    first.die()
    while rig.actor is first:
        await asyncio.sleep(0)
    assert rig.calls == ["start"], "nobody lets it on"
    keeping.cancel()


async def test_an_engine_that_moves_while_a_producer_is_replaced_has_moved_for_its_successor_too() -> None:
    rig = Group()
    keeping = await rig.start()
    await rig.group.resume_admission(7, ["e0"])
    await rig.group.engine_moved("e1", "e2")
    first = rig.actor
    rig.calls.clear()
    rig.may_start.clear()
    first.die()
    while rig.calls != ["start"]:
        await asyncio.sleep(0)
    await rig.group.engine_moved("e2", "e3")
    rig.may_start.set()
    while len(rig.calls) < 3:
        await asyncio.sleep(0)
    assert rig.calls == ["start", "engine_moved e2 e3", "resume_admission 7 ['e0']"], "it knew of what was before"
    keeping.cancel()


async def test_a_producer_that_dies_too_often_ends_the_run() -> None:
    rig = Group(max_restarts=1)
    keeping = await rig.start()
    first = rig.actor
    first.die()
    while rig.actor is first:
        await asyncio.sleep(0)
    rig.actor.die()
    with pytest.raises(ProcessDiedError):
        await keeping


async def test_a_producer_that_fails_by_itself_is_not_started_again() -> None:
    rig = Group()
    keeping = await rig.start()
    rig.actor.end.set_exception(DataError("no prompts"))
    with pytest.raises(DataError, match="no prompts"):
        await keeping
    assert rig.notes == []


async def stop_while_a_successor_starts(rig: Group) -> None:
    """The producer dies, and the stop is asked for before `may_start` lets its successor come up."""
    rig.calls.clear()
    rig.may_start.clear()
    rig.actor.die()
    while rig.calls != ["start"]:
        await asyncio.sleep(0)
    await rig.group.ask_to_stop()


async def test_a_successor_that_comes_up_after_the_stop_begins_nothing() -> None:
    rig = Group()
    keeping = await rig.start()
    await rig.group.resume_admission(7, ["e0"])
    await stop_while_a_successor_starts(rig)
    rig.may_start.set()
    await asyncio.wait_for(keeping, 5)  # what the first one had leased was taken back: that is no failure of the run
    assert rig.calls == ["start"], "it is not let on"
    assert rig.retired == [0]
    assert len(rig.ended) == 2, "and its process ends"


async def test_a_successor_that_dies_after_the_stop_is_not_replaced_and_fails_nothing() -> None:
    rig = Group()
    keeping = await rig.start()
    await stop_while_a_successor_starts(rig)
    rig.spawned[-1].dead = True
    rig.may_start.set()
    await asyncio.wait_for(keeping, 5)
    assert rig.calls == ["start"]
    assert len(rig.spawned) == 2


async def test_a_producer_that_dies_while_it_is_to_stop_is_not_replaced() -> None:
    rig = Group()
    keeping = await rig.start()
    await rig.group.ask_to_stop()
    rig.actor.die()
    with pytest.raises(ProcessDiedError):
        await keeping
