"""Engines of models that aren't trained, where the memory is the trainer's now and then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager

import pytest

from pipeline.engine_health import EngineKeeper
from pipeline.engine_in_turns import EngineInTurns
from pipeline.frozen_engines import FencesOfModels, FrozenEngines
from pipeline.memory_turns import MemoryTurns
from pipeline.sleeping_engine import Process, SleepingEngine
from tests.pipeline.publication_rig import Rig
from tests.pipeline.test_memory_turns import Takers
from tests.pipeline.test_replaced_in_turns import QUIET, EngineProcess
from tests.support.standin_engine import StandinEngine
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.protocol import GenerateRequest, GenerateResult, Sampling
from vime.errors import EngineError, PublicationError
from vime.settings.groups import ClusterSettings

PROMPT = [3, 4, 5]


class Run:
    """One engine that is trained and one that isn't, in turns with a trainer. Their events are in one list."""

    def __init__(self, trained: StandinEngine, frozen: StandinEngine) -> None:
        self.trained, self.frozen, self.events = trained, frozen, frozen.events
        self.turns = MemoryTurns(ClusterSettings(colocate=True), Takers(frozen.events))
        self.rig = Rig([trained], flush_interval=1, timeout_s=30.0, make_client=self.turns.engine)
        client = self.turns.engine(frozen.address, is_trained=False)
        assert isinstance(client, SleepingEngine)
        self.sleeping = client
        self.condemned: list[str] = []

    async def train(self) -> None:
        """One batch, then its publication, and whoever it has left asleep wakes."""
        await self.turns.give_to_trainer()
        self.events.append("train")
        await self.rig.publish()
        await self.turns.wake(self.rig.publisher.serving)

    async def ask(self, num_tokens: int = 4) -> GenerateResult:
        """Past the turns, as a reward does."""
        async with EngineClient(self.frozen.address) as client:
            request = GenerateRequest(f"asked-{num_tokens}", PROMPT, Sampling(max_tokens=num_tokens, temperature=0.0))
            return await client.generate(request)


@asynccontextmanager
async def started() -> AsyncIterator[Run]:
    """After the first publication."""
    with ExitStack() as stack:
        run = Run(*(stack.enter_context(StandinEngine()) for _ in range(2)))
        async with AsyncExitStack() as clients:
            await clients.enter_async_context(run.rig)
            clients.push_async_callback(run.sleeping.close)
            await clients.enter_async_context(asyncio.timeout(60))
            await run.train()
            run.events.clear()
            yield run


async def test_it_sleeps_while_the_trainer_trains_and_wakes_with_its_weights_when_the_trainer_has_left() -> None:
    async with started() as run:
        before = await run.ask()
        await run.train()
        assert run.events == ["no requests", "sleep", "train", "trainer leaves", "wake kv_cache weights"]
        assert (await run.ask()).token_ids == before.token_ids
        assert run.frozen.version == "default", "nothing was published to it"


async def test_it_answers_what_it_was_asked_before_it_sleeps_and_what_comes_later_when_it_is_awake() -> None:
    async with started() as run:
        early = asyncio.create_task(run.ask(200))
        while not run.frozen.num_running:
            await asyncio.sleep(0.001)
        await run.turns.give_to_trainer()
        assert run.frozen.asleep == {"weights", "kv_cache"}
        assert ((await early).finish_reason, len((await early).token_ids)) == ("length", 200)
        late = asyncio.create_task(run.ask())
        while not run.frozen.num_running:
            await asyncio.sleep(0.001)
        await run.rig.publish()
        assert not late.done()
        await run.turns.wake()
        assert len((await late).token_ids) == 4


async def test_after_a_turn_that_the_trainer_borrowed_it_is_awake_before_requests_start() -> None:
    async with started() as run:
        async with run.turns.lent_to_trainer(1, [run.trained.address]):
            assert run.frozen.asleep
        assert run.events[-2:] == ["wake kv_cache weights", "requests under 1 at 1"]
        assert run.frozen.asleep == set()


async def test_engines_wake_with_what_they_had_when_no_version_could_be_prepared() -> None:
    async with started() as run:
        await run.turns.give_to_trainer()
        run.rig.trainer.fails_with = PublicationError("the disk is full")
        publication = await run.rig.publish()
        assert not publication.raised
        assert run.trained.asleep
        await run.turns.wake(run.rig.publisher.serving)
        assert run.trained.asleep == run.frozen.asleep == set()
        run.rig.check_labels(0, await run.rig.generate())


async def test_one_that_does_not_wake_ends_the_run_or_is_replaced_where_engines_are() -> None:
    async with started() as run:
        await run.turns.give_to_trainer()
        run.frozen.faults.steps["/wake_up"] = "error"
        with pytest.raises(EngineError, match=rf"{run.frozen.address}: POST /wake_up answered 500"):
            await run.turns.wake()
        run.turns.replace_engine = lambda address, _: run.condemned.append(address)
        await run.turns.wake()
        assert run.condemned == [run.frozen.address]


@pytest.mark.parametrize("trainer_is_in", [False, True])
async def test_its_successor_serves_as_soon_as_the_trainer_is_out(trainer_is_in: bool) -> None:
    async with started() as run:
        process = EngineInTurns(EngineProcess(run.frozen, 1), run.turns)
        await process.restart()
        assert run.frozen.asleep == {"weights", "kv_cache"}
        if trainer_is_in:
            await run.turns.give_to_trainer()
        await run.turns.runs_anew(run.frozen.address, process.address)
        assert bool(run.frozen.asleep) is trainer_is_in
        await run.turns.wake()
        assert run.frozen.asleep == set()


async def test_a_successor_elsewhere_is_the_one_that_takes_turns() -> None:
    with StandinEngine() as elsewhere:
        async with started() as run:
            moving = EngineProcess(run.frozen, 1)
            moving.moves_to = elsewhere
            process = EngineInTurns(moving, run.turns)
            await process.restart()
            await run.turns.runs_anew(run.frozen.address, process.address)
            assert (run.sleeping.address, run.sleeping.process, elsewhere.asleep) == (
                elsewhere.address, Process.RUNS, set(),
            )  # fmt: skip
            await process.check(5.0)
            await run.turns.give_to_trainer()
            assert elsewhere.asleep == {"weights", "kv_cache"}


async def test_one_that_dies_in_the_trainers_turn_is_out_until_its_successor_is_awake() -> None:
    async with started() as run:
        served: list[list[str]] = []
        fenced: list[dict[str, str]] = []

        async def serve_only(addresses: Collection[str]) -> None:
            served.append(sorted(addresses))
            assert not addresses or not run.frozen.asleep, "requests come when it is awake"

        async def nobody_moves(address: str, now_at: str) -> None:
            raise AssertionError(f"{address} has not moved to {now_at}")

        address = run.frozen.address
        judge = FrozenEngines([address], serve_only, run.turns.runs_anew, lambda now: fenced.append(dict(now)))
        process = EngineProcess(run.frozen, 1)
        keeper = EngineKeeper([EngineInTurns(process, run.turns)], QUIET, lambda _: None)
        keeping = asyncio.create_task(keeper.run(FencesOfModels(run.rig.publisher, {address: judge}, nobody_moves)))
        await run.turns.give_to_trainer()
        process.dies()
        while run.sleeping.process is not Process.GONE:
            await asyncio.sleep(0.005)
        assert "start" not in run.events
        assert (served, [list(each) for each in fenced]) == ([[]], [[address]])
        await run.turns.wake(run.rig.publisher.serving)
        while fenced[-1]:
            await asyncio.sleep(0.005)
        assert served == [[], [address]]
        assert len((await run.ask()).token_ids) == 4
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
