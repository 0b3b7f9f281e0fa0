"""--use-distributed-post: requests go out through other processes, and come back as if they had not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from pipeline.cluster import Cluster
from pipeline.forwarders import REST_S, ForwarderActor, Forwarders
from tests.support.standin_engine import StandinEngine
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.protocol import GenerateRequest, Sampling
from vime.errors import EngineError, EngineUnavailable
from vime.settings.placement import Demand

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def forwarders() -> Iterator[list[Any]]:
    with Cluster(Demand(trainer_nodes=(1,)), 1) as cluster:
        yield cluster.spawn_everywhere(ForwarderActor)


def asked(name: str, tokens: list[int], num_tokens: int = 4) -> GenerateRequest:
    return GenerateRequest(name, tokens, Sampling(num_tokens, ignore_eos=True))


async def test_an_answer_is_the_same_as_without_them_and_so_is_a_refusal(forwarders: list[Any]) -> None:
    assert len(forwarders) == 1, "one for each node"
    with StandinEngine() as engine:
        async with (
            EngineClient(engine.address) as direct,
            EngineClient(engine.address, poster=Forwarders(forwarders)) as posted,
        ):
            expected = await direct.generate(asked("a", [5, 6]))
            found = await posted.generate(asked("a", [5, 6]))
            assert (found.token_ids, found.log_probs) == (expected.token_ids, expected.log_probs)
            with pytest.raises(EngineError, match=rf"Engine {engine.address}: POST .* answered 400") as refused:
                await posted.generate(asked("b", [500]))
            assert not isinstance(refused.value, EngineUnavailable)


async def test_cancelling_a_call_ends_its_request(forwarders: list[Any]) -> None:
    with StandinEngine() as engine:
        engine.faults.step_s = 0.02
        async with EngineClient(engine.address, poster=Forwarders(forwarders)) as posted:
            task = asyncio.create_task(posted.generate(asked("long", [5, 6], 2000)))
            async with asyncio.timeout(30):
                while (await posted.metrics()).num_running == 0:
                    await asyncio.sleep(0.01)
                task.cancel()
                while (await posted.metrics()).num_running:
                    await asyncio.sleep(0.01)
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_a_process_that_dies_fails_its_requests_as_an_engine_does_and_comes_back(forwarders: list[Any]) -> None:
    with StandinEngine() as engine:
        engine.faults.step_s = 0.02
        async with EngineClient(engine.address, poster=Forwarders(forwarders)) as posted:
            task = asyncio.create_task(posted.generate(asked("long", [5, 6], 2000)))
            async with asyncio.timeout(60):
                while (await posted.metrics()).num_running == 0:
                    await asyncio.sleep(0.01)
                ray.kill(forwarders[0], no_restart=False)
                with pytest.raises(EngineUnavailable, match="the process that forwards requests ended"):
                    await task
                engine.faults.step_s = 0.0
                while True:
                    try:
                        assert (await posted.generate(asked("again", [5, 6]))).token_ids
                        break
                    except EngineUnavailable:
                        await asyncio.sleep(0.1)


class Lost:
    """The actor of a node that is gone."""

    class post:
        @staticmethod
        async def remote(*_: object) -> bytes:
            raise RayActorError(error_msg="The node died.")


class There:
    class post:
        @staticmethod
        async def remote(*_: object) -> bytes:
            return b"answer"


async def test_the_process_of_a_lost_node_costs_one_request_now_and_then_and_the_others_send_the_rest() -> None:
    now = [0.0]
    forwarders = Forwarders([Lost(), There()], clock=lambda: now[0])

    async def post() -> bytes:
        return await forwarders.post("Engine", "http://e", "/generate", b"", {}, 1.0)

    with pytest.raises(EngineUnavailable, match="the process that forwards requests ended"):
        await post()
    assert [await post() for _ in range(5)] == [b"answer"] * 5
    now[0] = REST_S + 1.0
    num_failed = 0
    for _ in range(6):
        try:
            await post()
        except EngineUnavailable:
            num_failed += 1
    assert num_failed == 1, "it is tried again, once"
