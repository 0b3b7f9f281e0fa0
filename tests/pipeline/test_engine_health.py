"""Engines that die, stall or fail are noticed, fenced and replaced, and given up after some restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pipeline.engine_health import MAX_RESTARTS, EngineKeeper, HealthSettings
from vime.errors import EngineError, EngineStartError

NEVER = HealthSettings(interval_s=60.0, timeout_s=1.0, first_wait_s=60.0)
OFTEN = HealthSettings(interval_s=0.01, timeout_s=0.05, first_wait_s=0.0)


class Engine:
    """Its process ends, its checks fail and its restarts fail when told to."""

    def __init__(self, number: int = 0) -> None:
        self.name, self.address = f"engine {number}", f"http://e{number}"
        self.end: asyncio.Queue[str] = asyncio.Queue()
        self.check_error: EngineError | None = None
        self.checked, self.restarted = asyncio.Event(), asyncio.Event()
        self.num_restarts = 0
        self.is_stopped = False
        self.will_not_start = False
        self.moves_to: str | None = None

    async def ended(self) -> str:
        return await self.end.get()

    async def check(self, timeout_s: float) -> None:
        self.checked.set()
        if self.check_error is not None:
            await asyncio.sleep(timeout_s)
            raise self.check_error

    async def stop(self) -> None:
        self.is_stopped = True

    async def restart(self) -> None:
        self.num_restarts += 1
        if self.will_not_start:
            raise EngineStartError("no memory")
        self.check_error = None
        self.address, self.moves_to = self.moves_to or self.address, None
        self.restarted.set()


class Fences:
    """Remembers what it was told; `back` is set when an engine is readmitted."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.moment: int | None = 1
        self.back = asyncio.Event()

    async def fence(self, address: str, reason: str) -> None:
        self.said.append(f"fence {address}: {reason}")

    async def give_up(self, address: str) -> None:
        self.said.append(f"give up {address}")

    async def readmit(self, address: str, now_at: str) -> None:
        self.said.append(f"readmit {address}" + (f" at {now_at}" if now_at != address else ""))
        self.back.set()


class Kept:
    def __init__(self, engines: list[Engine], settings: HealthSettings) -> None:
        self.fences = Fences()
        self.notes: list[str] = []
        self.keeper = EngineKeeper(engines, settings, self.notes.append)
        self.running = asyncio.create_task(self.keeper.run(self.fences))


@asynccontextmanager
async def kept(engines: list[Engine], settings: HealthSettings) -> AsyncIterator[Kept]:
    watched = Kept(engines, settings)
    try:
        async with asyncio.timeout(10):
            yield watched
    finally:
        watched.running.cancel()
        await asyncio.gather(watched.running, return_exceptions=True)


async def test_an_engine_whose_process_ends_is_fenced_and_then_replaced() -> None:
    engine, other = Engine(0), Engine(1)
    async with kept([engine, other], NEVER) as watched:
        engine.end.put_nowait("status 137")
        await watched.fences.back.wait()
        assert watched.fences.said == ["fence http://e0: status 137", "readmit http://e0"]
        assert (engine.num_restarts, other.num_restarts) == (1, 0)
        assert "engine 0 (http://e0) failed" in watched.notes[0]
        assert "status 137" in watched.notes[0]


async def test_an_engine_that_went_to_another_node_is_kept_there() -> None:
    engine = Engine()
    async with kept([engine], NEVER) as watched:
        engine.moves_to = "http://n0"
        engine.end.put_nowait("its node is lost")
        await watched.fences.back.wait()
        watched.fences.back.clear()
        watched.keeper.replace("http://e0", "an old word")
        watched.keeper.replace("http://n0", "holds a mix")
        await watched.fences.back.wait()
        assert watched.fences.said == [
            "fence http://e0: its node is lost",
            "readmit http://e0 at http://n0",
            "fence http://n0: holds a mix",
            "readmit http://n0",
        ]


async def test_an_engine_that_stalls_is_noticed_by_its_check() -> None:
    engine = Engine()
    async with kept([engine], OFTEN) as watched:
        await engine.checked.wait()
        engine.check_error = EngineError("took longer than 0.05 s")
        await watched.fences.back.wait()
        assert watched.fences.said[0] == "fence http://e0: took longer than 0.05 s"


async def test_engines_are_not_checked_before_the_first_wait_unless_a_request_failed() -> None:
    engine = Engine()
    async with kept([engine], NEVER) as watched:
        await asyncio.sleep(0.05)
        assert not engine.checked.is_set()
        engine.check_error = EngineError("answered 500")
        watched.keeper.suspect(engine.address)
        await watched.fences.back.wait()
        assert engine.num_restarts == 1


async def test_a_check_that_a_publication_ran_into_does_not_count() -> None:
    engine = Engine()
    async with kept([engine], OFTEN) as watched:
        await engine.checked.wait()
        engine.check_error = EngineError("stands still")
        engine.checked.clear()
        await engine.checked.wait()
        watched.fences.moment = 2  # published while the check was under way
        engine.check_error = None
        await asyncio.sleep(0.2)
        assert watched.fences.said == []


async def test_no_check_begins_while_a_publication_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.engine_health.QUIET_POLL_S", 0.01)
    engine = Engine()
    watched = Kept([engine], OFTEN)
    watched.fences.moment = None
    await asyncio.sleep(0.1)
    assert not engine.checked.is_set()
    watched.fences.moment = 2
    await asyncio.wait_for(engine.checked.wait(), 5)
    watched.running.cancel()


async def test_an_engine_can_be_replaced_on_request() -> None:
    engine = Engine()
    async with kept([engine], NEVER) as watched:
        watched.keeper.replace(engine.address, "holds a mix")
        await watched.fences.back.wait()
        assert watched.fences.said[0] == "fence http://e0: holds a mix"


async def test_an_engine_that_fails_again_and_again_is_given_up_and_the_others_go_on() -> None:
    engine, other = Engine(0), Engine(1)
    async with kept([engine, other], NEVER) as watched:
        for _ in range(MAX_RESTARTS):
            watched.fences.back.clear()
            engine.end.put_nowait("status 1")
            await watched.fences.back.wait()
        engine.end.put_nowait("status 1")
        while "given up" not in watched.notes[-1]:
            await asyncio.sleep(0.01)
        assert engine.num_restarts == MAX_RESTARTS
        assert not watched.running.done()
        assert engine.is_stopped, "what can't serve holds nothing"
        assert "engine 0 (http://e0) is given up: status 1, after 3 restarts." in watched.notes[-1]
        assert watched.fences.said[-1] == "give up http://e0"


async def test_a_run_whose_last_engine_is_given_up_ends_with_the_reason() -> None:
    engine = Engine()
    engine.will_not_start = True
    async with kept([engine], NEVER) as watched:
        engine.end.put_nowait("status 1")
        with pytest.raises(EngineStartError, match=r"No engine is left\. engine 0 .* no memory, after 3 restarts"):
            await watched.running
        assert engine.num_restarts == MAX_RESTARTS
