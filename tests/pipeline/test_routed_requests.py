"""Requests through a real router before stand-in engines: groups stay together, fenced engines get nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pipeline import serving_engines
from pipeline.routers import Routers
from pipeline.run_folder import RunFolder
from pipeline.serving_engines import ServingEngines
from tests.support.standin_engine import StandinEngine
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.protocol import GenerateRequest, Sampling
from vime.backends.vllm_utils.routed import RoutedClient
from vime.errors import EngineStartError, GenerationAborted, RunFailedError
from vime.rollout.vllm_rollout import get_model_url
from vime.settings.groups import ModelRouter
from vime.settings.parse import HookArgs, parse_settings

pytestmark = [pytest.mark.multiproc]

NUM_GROUPS = 24


@pytest.fixture
def engines() -> Iterator[list[StandinEngine]]:
    with StandinEngine() as first, StandinEngine() as second:
        yield [first, second]


class Rig:
    def __init__(self, routers: Routers, engines: list[StandinEngine]) -> None:
        (self.router,) = routers.of_models
        self.routers, self.engines = routers, engines
        self.addresses = [engine.address for engine in engines]
        self.clients = [EngineClient(address) for address in self.addresses]
        self.client = RoutedClient(f"http://{self.router.host}:{self.router.port}")
        self.serving = ServingEngines(self.clients, router=self.client, run_id="run")
        self._number = 0

    async def set(self, serving: list[str]) -> None:
        await self.routers.set("default", self.addresses, serving)
        self.serving.serve(serving)

    def ask(self, group: int, max_tokens: int = 4) -> asyncio.Task[list[int]]:
        self._number += 1
        sampler = self.serving.of_group(group)
        assert sampler is not None
        request = GenerateRequest(f"r{self._number}", [1, 2, 3], Sampling(max_tokens))

        async def tokens() -> list[int]:
            return (await self.serving.request(sampler, sampler.generate(request))).token_ids

        return asyncio.create_task(tokens())

    async def served_by(self, group: int) -> int:
        """Number of the engine that serves a group's requests."""
        before = [engine.num_served for engine in self.engines]
        await asyncio.gather(self.ask(group), self.ask(group))
        served = [engine.num_served - old for engine, old in zip(self.engines, before, strict=True)]
        assert sorted(served) == [0, 2], "members of a group share an engine"
        return served.index(2)


@asynccontextmanager
async def routed(folder: Path, engines: list[StandinEngine], words: str = "") -> AsyncIterator[Rig]:
    settings = parse_settings(f"--save {folder} {words}".split())
    routers = Routers(settings, RunFolder.of(settings), lambda _: None, lambda: asyncio.sleep(0))
    await routers.start(["default"], "127.0.0.1")
    rig = Rig(routers, engines)
    try:
        yield rig
    finally:
        await routers.stop()
        for client in rig.clients:
            await client.close()
        await rig.client.close()


async def test_members_of_a_group_share_an_engine_and_groups_spread_over_those_that_serve(
    tmp_path: Path, engines: list[StandinEngine]
) -> None:
    async with routed(tmp_path, engines) as rig:
        await rig.set(rig.addresses)
        first = [await rig.served_by(group) for group in range(NUM_GROUPS)]
        assert set(first) == {0, 1}
        assert [await rig.served_by(group) for group in range(NUM_GROUPS)] == first
        await rig.set(rig.addresses[:1])
        assert {await rig.served_by(group) for group in range(NUM_GROUPS)} == {0}, "a fenced engine gets nothing"
        await rig.set(rig.addresses)
        assert [await rig.served_by(group) for group in range(NUM_GROUPS)] == first
        assert "run-1" not in (tmp_path / "logs" / "router_default.log").read_text(), "no line for each request"


async def test_requests_to_an_engine_that_hangs_end_when_it_is_fenced(
    tmp_path: Path, engines: list[StandinEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_answer(self: EngineClient) -> bool:
        return self.address != engines[1].address

    monkeypatch.setattr(EngineClient, "ready", no_answer)
    async with routed(tmp_path, engines) as rig:
        await rig.set(rig.addresses)
        group = await _group_of(rig, 1)
        engines[1].faults.step_s = 60.0
        hanging = rig.ask(group)
        await asyncio.sleep(0.2)
        await rig.set(rig.addresses[:1])
        with pytest.raises(GenerationAborted):
            await asyncio.wait_for(hanging, 10)


async def _group_of(rig: Rig, engine: int) -> int:
    group = 0
    while await rig.served_by(group) != engine:
        group += 1
    return group


async def test_workers_that_others_registered_stay(tmp_path: Path, engines: list[StandinEngine]) -> None:
    async with routed(tmp_path, engines[:1]) as rig:
        workers = rig.routers._running["default"].workers
        assert await workers.set([engines[1].address], [engines[1].address]) == []
        await rig.set(rig.addresses)
        assert sorted(await workers.addresses()) == sorted(engine.address for engine in engines)
        await rig.set([])
        assert await workers.addresses() == [engines[1].address]


async def test_a_router_that_ends_too_often_is_named_and_one_that_does_not_start_shows_why(
    tmp_path: Path, engines: list[StandinEngine]
) -> None:
    async with routed(tmp_path, engines, "--max-process-restarts 0") as rig:
        watching = asyncio.create_task(rig.routers.keep())
        server = rig.routers._running["default"].server
        assert server is not None
        server.stop()
        with pytest.raises(RunFailedError, match="the router of default ended with status"):
            await asyncio.wait_for(watching, 10)
    with pytest.raises(EngineStartError, match="Last log lines"):
        async with routed(tmp_path, engines, "--router-policy nonsense"):
            pass


def test_hooks_find_the_routers_of_all_models() -> None:
    settings = parse_settings([]).with_routers((ModelRouter("actor", "h", 1), ModelRouter("ref", "g", 2)))
    args = HookArgs(settings)
    assert (args.vllm_router_ip, args.vllm_router_port) == ("h", 1)
    assert args.vllm_model_routers == {"actor": ("h", 1), "ref": ("g", 2)}
    assert get_model_url(args, "ref") == "http://g:2/inference/v1/generate"
    assert get_model_url(args, "actor", "/v1/chat/completions") == "http://h:1/v1/chat/completions"
    with pytest.raises(Exception, match="No router serves a model named 'judge'; there is 'actor', 'ref'"):
        get_model_url(args, "judge")


async def test_a_router_that_dies_is_replaced_at_its_address_with_the_engines_that_serve(
    tmp_path: Path, engines: list[StandinEngine]
) -> None:
    async with routed(tmp_path, engines) as rig:
        await rig.set(rig.addresses[:1])
        keeping = asyncio.create_task(rig.routers.keep())
        before = (rig.routers.of_models, rig.routers.pids)
        (pid,) = rig.routers.pids
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while rig.routers.pids == before[1]:
                await asyncio.sleep(0.02)
            while not await rig.client.answers():
                await asyncio.sleep(0.02)
        await rig.set(rig.addresses[:1])
        assert rig.routers.of_models == before[0]
        assert {await rig.served_by(group) for group in range(NUM_GROUPS)} == {0}, "a fenced engine is left out"
        keeping.cancel()


async def test_requests_that_lose_their_router_are_aborted_and_not_failed(
    tmp_path: Path, engines: list[StandinEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_engines, "ROUTER_TRIES", 1)
    for engine in engines:
        engine.faults.step_s = 60.0
    async with routed(tmp_path, engines) as rig:
        await rig.set(rig.addresses)
        asking = rig.ask(0)
        async with asyncio.timeout(20):
            while not any([(await client.metrics()).num_running for client in rig.clients]):
                await asyncio.sleep(0.02)
        os.kill(rig.routers.pids[0], signal.SIGKILL)
        with pytest.raises(GenerationAborted, match="the router failed"):
            await asyncio.wait_for(asking, 60)
