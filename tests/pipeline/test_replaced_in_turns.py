"""Engines that take turns with a trainer and fail: when their successors start, and with which weights they serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import pytest

from pipeline.engine_health import EngineKeeper, HealthSettings
from pipeline.engine_in_turns import EngineInTurns
from pipeline.memory_turns import MemoryTurns
from pipeline.sleeping_engine import Process
from tests.pipeline.publication_rig import Rig, is_running
from tests.support.standin_engine import StandinEngine
from vime.backends.vllm_utils.client import EngineClient
from vime.errors import EngineError, EngineStartError
from vime.settings.groups import ClusterSettings

NAMES = frozenset({"a", "b"})
QUIET = HealthSettings(interval_s=60.0, timeout_s=1.0, first_wait_s=60.0)


class EngineProcess:
    """As the driver sees a stand-in: `dies` ends its process, and a successor starts at the same address."""

    def __init__(self, engine: StandinEngine, number: int) -> None:
        self.name, self.address, self.engine = f"engine {number}", engine.address, engine
        self.events = engine.events
        self.died = asyncio.Event()
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.num_failing_starts = 0
        self.moves_to: StandinEngine | None = None
        """Where its successor is, when not at the same address."""

    def dies(self) -> None:
        self.engine.faults.dead = True
        self.died.set()

    async def ended(self) -> str:
        await self.died.wait()
        return "status 137"

    async def check(self, timeout_s: float) -> None:
        async with EngineClient(self.address) as client:
            await client.check(timeout_s)

    async def stop(self) -> None:
        self.engine.faults.dead = True

    async def restart(self) -> None:
        self.events.append("start")
        await self.may_start.wait()
        if self.num_failing_starts:
            self.num_failing_starts -= 1
            raise EngineStartError("no memory")
        self.died.clear()
        if self.moves_to is None:
            self.engine.start_anew()
        else:
            self.engine, self.moves_to = self.moves_to, None
            self.address = self.engine.address


class Run:
    """Two parties and who replaces engines. Weights can only be gathered while every engine's cache is gone."""

    def __init__(self, engines: list[StandinEngine]) -> None:
        self.engines, self.events = engines, engines[0].events
        for engine in engines:
            engine.events = self.events
        self.turns = MemoryTurns(ClusterSettings(colocate=True), self)
        self.processes = [EngineProcess(engine, number) for number, engine in enumerate(engines)]
        self.keeper = EngineKeeper([EngineInTurns(each, self.turns) for each in self.processes], QUIET, lambda _: None)
        self.turns.replace_engine = self.keeper.replace
        self.rig = Rig(
            engines,
            flush_interval=1,
            timeout_s=30.0,
            make_client=self.turns.engine,
            replace=self.keeper.replace,
            lend_to_engines=self.turns.lent_to_engines,
        )
        self._send = self.rig.source.send_weights
        self.rig.source.send_weights = self.send_alone  # type: ignore[method-assign]

    async def send_alone(self) -> int:
        self.trainer_comes()
        return await self._send()

    def trainer_comes(self) -> None:
        self.events.append("trainer comes")
        assert all(engine.faults.dead or "kv_cache" in engine.asleep for engine in self.engines)

    async def rest_trainers(self) -> None:
        self.events.append("trainer leaves")

    async def pause_admission(self) -> None:
        await self.rig.admission.pause_admission()

    async def resume_admission(self, policy_version: int, serving: list[str]) -> None:
        await self.rig.admission.resume_admission(policy_version, serving)

    async def train(self) -> None:
        """One batch, then its publication."""
        await self.turns.give_to_trainer()
        self.trainer_comes()
        await self.rig.publish()

    async def until(self, number: int, process: Process) -> None:
        while self.turns.sleeping(self.engines[number].address).process is not process:
            await asyncio.sleep(0.005)

    async def fenced(self, number: int) -> None:
        while self.engines[number].address not in self.rig.publisher.fenced:
            await asyncio.sleep(0.005)

    async def behind(self) -> None:
        await self.rig.publisher.someone_is_behind()

    def check_apart(self) -> None:
        """No engine starts or takes room for a cache between the trainer's coming and its leaving."""
        is_in = False
        for event in self.events:
            is_in = event == "trainer comes" or (is_in and event != "trainer leaves")
            assert not (is_in and (event == "start" or "kv_cache" in event)), self.events


@asynccontextmanager
async def started(num_engines: int) -> AsyncIterator[Run]:
    """After the first publication."""
    with ExitStack() as stack:
        run = Run([stack.enter_context(StandinEngine(required_names=NAMES)) for _ in range(num_engines)])
        keeping = asyncio.create_task(run.keeper.run(run.rig.publisher))
        try:
            async with run.rig, asyncio.timeout(60):
                await run.train()
                yield run
                run.check_apart()
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


async def test_an_engine_that_dies_while_others_sample_comes_back_asleep_and_serves_from_the_next_turn_on() -> None:
    async with started(2) as run:
        running = run.rig.generate(0, max_tokens=400)
        await is_running(run.rig)
        run.processes[1].dies()
        await run.behind()
        assert run.engines[1].asleep == {"weights", "kv_cache"}
        assert run.rig.admission.serving == [run.engines[0].address]
        assert (await running).finish_reason == "length", "the other engine was not stopped for it"
        await run.train()
        assert run.rig.publisher.fenced == {}
        assert [engine.version for engine in run.engines] == ["2", "2"]
        await run.rig.check_standing()


async def test_an_engine_that_dies_while_the_trainer_trains_starts_again_when_it_has_left() -> None:
    async with started(2) as run:
        await run.turns.give_to_trainer()
        run.trainer_comes()
        run.processes[1].dies()
        await run.until(1, Process.GONE)
        assert "start" not in run.events
        await run.rig.publish()
        await run.behind()
        assert run.engines[1].asleep == {"weights", "kv_cache"}
        await run.train()
        assert run.rig.publisher.fenced == {}
        await run.rig.check_standing()


async def test_a_trainer_with_no_engine_left_makes_room_for_one_and_publishes_to_it() -> None:
    async with started(1) as run:
        await run.turns.give_to_trainer()
        run.trainer_comes()
        run.processes[0].dies()
        await run.fenced(0)
        publication = await run.rig.publish()
        assert (publication.version, publication.raised, publication.fenced) == (2, True, {})
        await run.rig.check_standing()


async def test_the_trainer_waits_for_an_engine_that_is_starting() -> None:
    async with started(2) as run:
        run.processes[1].may_start.clear()
        run.processes[1].dies()
        while run.events[-1] != "start":
            await asyncio.sleep(0.005)
        giving = asyncio.create_task(run.turns.give_to_trainer())
        while not run.engines[0].asleep:
            await asyncio.sleep(0.005)
        assert not giving.done()
        run.processes[1].may_start.set()
        await giving
        assert run.engines[1].asleep == {"weights", "kv_cache"}


async def test_an_engine_that_keeps_its_memory_is_ended_before_the_trainer_comes() -> None:
    async with started(2) as run:
        run.engines[1].faults.steps["/sleep"] = "error"
        await run.turns.give_to_trainer()
        run.trainer_comes()
        assert run.engines[1].faults.dead
        await run.rig.publish()
        await run.behind()
        await run.train()
        await run.rig.check_standing()
        assert run.rig.publisher.fenced == {}


async def test_an_engine_that_does_not_start_again_leaves_the_memory_to_the_trainer_and_is_tried_again() -> None:
    async with started(2) as run:
        run.processes[1].num_failing_starts = 1
        run.processes[1].dies()
        await run.behind()
        assert run.events.count("start") == 2
        await run.train()
        assert run.rig.publisher.fenced == {}
        await run.rig.check_standing()


async def test_an_engine_whose_successor_is_elsewhere_sleeps_there_and_serves_from_there() -> None:
    with StandinEngine(required_names=NAMES) as elsewhere:
        async with started(2) as run:
            run.processes[1].moves_to = elsewhere
            run.processes[1].dies()
            await run.behind()
            assert elsewhere.asleep == {"weights", "kv_cache"}
            await run.train()
            assert sorted(run.rig.admission.serving) == sorted([run.engines[0].address, elsewhere.address])
            assert (elsewhere.version, elsewhere.asleep) == ("2", set())


async def test_after_a_turn_that_the_trainer_borrowed_only_engines_that_are_the_same_process_serve_on() -> None:
    async with started(2) as run:
        async with run.turns.lent_to_trainer(1, [engine.address for engine in run.engines]):
            run.trainer_comes()
            run.processes[1].dies()
            await run.until(1, Process.GONE)
        assert run.rig.admission.serving == [run.engines[0].address]
        await run.behind()
        assert run.engines[1].asleep == {"weights", "kv_cache"}


async def test_an_engine_that_dies_while_another_one_wakes_after_such_a_turn_gets_no_requests() -> None:
    async with started(2) as run:
        addresses = [engine.address for engine in run.engines]
        second = run.turns.sleeping(addresses[1])

        async def borrow() -> None:
            async with run.turns.lent_to_trainer(1, addresses):
                run.trainer_comes()
                run.engines[0].faults.steps["/wake_up"] = "hang"

        num_sleeps = second.num_sleeps
        borrowing = asyncio.create_task(borrow())
        while second.num_sleeps == num_sleeps or not second.is_awake:
            await asyncio.sleep(0.005)
        run.processes[1].dies()
        await run.behind()
        run.engines[0].faults.steps.clear()
        await borrowing
        assert run.rig.admission.serving == [addresses[0]]


async def test_an_engine_that_sleeps_passes_its_check_and_one_that_is_awake_must_sample() -> None:
    async with started(1) as run:
        engine = EngineInTurns(run.processes[0], run.turns)
        await engine.check(5.0)
        run.engines[0].faults.steps["/health"] = "error"
        with pytest.raises(EngineError, match="answered 500"):
            await engine.check(5.0)
        run.engines[0].faults.steps["/health"] = "hang"
        checking = asyncio.create_task(engine.check(0.5))
        await run.turns.give_to_trainer()
        await checking
        await engine.check(0.1)
