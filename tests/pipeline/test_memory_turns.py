"""Engines and trainer that share devices: who has the memory when, and what becomes of requests, KV and versions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager

import pytest

from pipeline.memory_turns import MemoryTurns
from tests.pipeline.publication_rig import Rig, is_running
from tests.support.standin_engine import BLOCK_TOKENS, StandinEngine
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.engine_needs import check_engine
from vime.backends.vllm_utils.protocol import NO_COLUMNS, GenerateRequest, Sampling
from vime.errors import EngineError, EngineStartError
from vime.settings.groups import ClusterSettings

NAMES = frozenset({"a", "b"})


class Takers:
    """The trainer's ranks and the producers; everything is noted in the engines' order of events."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    async def rest_trainers(self) -> None:
        self.events.append("trainer leaves")

    async def pause_admission(self) -> None:
        self.events.append("no requests")

    async def resume_admission(self, policy_version: int, serving: list[str]) -> None:
        self.events.append(f"requests under {policy_version} at {len(serving)}")


class Turns:
    """Engines that share their devices with a trainer."""

    def __init__(self, engines: list[StandinEngine], cluster: ClusterSettings) -> None:
        self.engines = engines
        self.events = engines[0].events
        self.takers = Takers(self.events)
        self.turns = MemoryTurns(cluster, self.takers)
        self.rig = Rig(engines, flush_interval=1, make_client=self.turns.engine)

    async def train(self) -> None:
        """One batch, then its publication."""
        await self.turns.give_to_trainer()
        self.events.append("train")
        await self.rig.publish()


@pytest.fixture
def engines() -> Iterator[list[StandinEngine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(StandinEngine(required_names=NAMES)) for _ in range(2)]


@asynccontextmanager
async def started(engines: list[StandinEngine], cluster: ClusterSettings) -> AsyncIterator[Turns]:
    """After the first publication."""
    made = Turns(engines, cluster)
    async with made.rig:
        await made.train()
        made.events.clear()
        yield made


COLOCATED = ClusterSettings(colocate=True)


async def test_engines_sleep_while_the_trainer_trains_and_it_leaves_before_they_have_all_their_memory(
    engines: list[StandinEngine],
) -> None:
    async with started(engines, COLOCATED) as turns:
        await turns.train()
        assert turns.events == [
            "no requests", "sleep", "train", "wake weights", "load", "trainer leaves", "wake kv_cache"
        ]  # fmt: skip
        assert [engine.asleep for engine in engines] == [set(), set()]
        await turns.rig.check_standing()


async def test_a_request_that_runs_when_engines_fall_asleep_is_ended_and_none_is_served_asleep(
    engines: list[StandinEngine],
) -> None:
    async with started(engines, COLOCATED) as turns:
        running = turns.rig.generate(max_tokens=1000)
        await is_running(turns.rig)
        await turns.turns.give_to_trainer()
        ended = await running
        assert ended.finish_reason == "abort"
        turns.rig.check_labels(0, ended)
        early = turns.rig.generate()
        await turns.rig.publish()
        assert (await early).token_ids == []
        result = await turns.rig.generate()
        assert [span.version for span in result.version_spans] == [2]
        turns.rig.check_labels(0, result)


async def test_keys_and_values_of_before_a_turn_are_never_used_after_it(engines: list[StandinEngine]) -> None:
    prompt = [1] * (2 * BLOCK_TOKENS + 5)

    async def num_cached(client: EngineClient, number: int) -> int:
        result = await client.generate(GenerateRequest(f"long-{number}", prompt, Sampling(max_tokens=2)))
        return result.num_cached_tokens

    async with started(engines, COLOCATED) as turns:
        client = turns.rig.clients[0]
        assert [await num_cached(client, number) for number in range(2)] == [0, 2 * BLOCK_TOKENS]
        await turns.turns.give_to_trainer()
        assert not engines[0].cache
        await turns.rig.publish()
        assert await num_cached(client, 2) == 0


async def test_after_a_publication_that_fails_engines_serve_the_weights_that_they_had(
    engines: list[StandinEngine],
) -> None:
    async with started(engines, COLOCATED) as turns:
        await turns.turns.give_to_trainer()
        for engine in engines:
            engine.faults.steps["/start_weight_update"] = "error"
        publication = await turns.rig.publish()
        assert not publication.raised
        assert [engine.asleep for engine in engines] == [set(), set()]
        turns.rig.check_labels(0, await turns.rig.generate())


async def test_an_engine_that_fails_to_load_stays_out_sleeps_with_the_others_and_is_repaired_by_the_next_version(
    engines: list[StandinEngine],
) -> None:
    async with started(engines, COLOCATED) as turns:
        engines[1].faults.num_failed_updates = 1
        await turns.train()
        assert list(turns.rig.publisher.fenced) == [engines[1].address]
        assert engines[1].asleep == {"kv_cache"}
        assert engines[0].asleep == set()
        await turns.turns.give_to_trainer()
        assert [engine.asleep for engine in engines] == [{"weights", "kv_cache"}] * 2
        await turns.rig.publish()
        assert turns.rig.publisher.fenced == {}
        await turns.rig.check_standing()


async def test_an_engine_that_keeps_its_memory_ends_the_turn_with_its_name(engines: list[StandinEngine]) -> None:
    async with started(engines, COLOCATED) as turns:
        engines[1].faults.steps["/sleep"] = "error"
        with pytest.raises(EngineError, match=rf"{engines[1].address}: POST /sleep answered 500"):
            await turns.turns.give_to_trainer()


async def test_the_trainer_may_compute_between_publications_and_engines_go_on_as_before(
    engines: list[StandinEngine],
) -> None:
    async with started(engines, COLOCATED) as turns:
        async with turns.turns.lent_to_trainer(1, [engines[0].address]):
            turns.events.append("score")
            assert engines[0].asleep
        assert turns.events == [
            "no requests", "sleep", "score", "trainer leaves", "wake kv_cache weights", "requests under 1 at 1"
        ]  # fmt: skip
        assert engines[1].asleep, "an engine that isn't named gets no requests and stays as it is"
        turns.rig.check_labels(0, await turns.rig.generate())


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        (ClusterSettings(), ["train", "load"]),
        (ClusterSettings(offload_train=True), ["train", "load"]),
        (ClusterSettings(colocate=True, offload_rollout=False, offload_train=False), ["train", "load"]),
        (
            ClusterSettings(offload_rollout=True),
            ["no requests", "sleep", "train", "wake weights", "load", "wake kv_cache"],
        ),
    ],
)
async def test_who_keeps_its_memory_is_left_alone(
    engines: list[StandinEngine], cluster: ClusterSettings, expected: list[str]
) -> None:
    async with started(engines, cluster) as turns:
        await turns.train()
        assert turns.events == expected


@pytest.mark.parametrize(("colocate", "expected"), [(True, ["trainer", "leaves", "engines"]), (False, None)])
async def test_on_shared_devices_engines_start_when_the_trainer_has_left(
    colocate: bool, expected: list[str] | None
) -> None:
    events: list[str] = []
    started_both = asyncio.Barrier(1 if colocate else 2)

    class Noted(Takers):
        async def rest_trainers(self) -> None:
            events.append("leaves")

    async def engines() -> list[str]:
        async with started_both:
            events.append("engines")
        return ["http://engine"]

    async def trainers() -> None:
        async with started_both:
            events.append("trainer")

    turns = MemoryTurns(ClusterSettings(colocate=colocate), Noted(events))
    assert await asyncio.wait_for(turns.start_both(engines, trainers), 5) == ["http://engine"]
    assert expected is None or events == expected


async def test_an_engine_without_a_sleep_route_is_refused_by_name_when_it_must_sleep(
    engines: list[StandinEngine],
) -> None:
    async with EngineClient(engines[0].address) as client:
        able = await client.capabilities()
        check_engine(client.address, able, NO_COLUMNS, sleeps=True)
        engines[0].has_sleep = False
        unable = await client.capabilities()
        check_engine(client.address, unable, NO_COLUMNS)
        with pytest.raises(EngineStartError, match="can't leave its device's memory: it has no route /sleep") as caught:
            check_engine(client.address, unable, NO_COLUMNS, sleeps=True)
    assert "--no-offload-rollout" in caught.value.next_step
