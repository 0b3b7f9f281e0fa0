"""The client against an engine that misbehaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import torch

from tests.support.standin_engine import StandinEngine
from tests.vime.backends.vllm_utils.publications import Publisher
from vime.backends.vllm_utils.client import EngineClient, version_at_least
from vime.backends.vllm_utils.protocol import GenerateRequest, Sampling
from vime.backends.vllm_utils.sender import WeightSender
from vime.backends.vllm_utils.wire_032 import decode_generate, parse_metrics, parse_version
from vime.errors import EngineError

REQUEST = GenerateRequest("one", [1, 2, 3], Sampling(max_tokens=2))


@pytest.fixture
def standin() -> Iterator[StandinEngine]:
    with StandinEngine() as engine:
        yield engine


@pytest.fixture
async def client(standin: StandinEngine) -> AsyncIterator[EngineClient]:
    async with EngineClient(standin.address, control_timeout_s=0.5, generate_timeout_s=0.5) as client:
        yield client


async def test_a_dropped_connection_names_engine_and_route(standin: StandinEngine, client: EngineClient) -> None:
    standin.faults.num_dropped_connections = 1
    with pytest.raises(EngineError, match=r"POST /inference/v1/generate failed: ServerDisconnected") as error:
        await client.generate(REQUEST)
    assert standin.address in str(error.value)
    assert (await client.generate(REQUEST)).finish_reason == "length"


async def test_a_slow_engine_is_given_up_in_bounded_time(standin: StandinEngine, client: EngineClient) -> None:
    standin.faults.step_s = 5.0
    with pytest.raises(EngineError, match=r"/inference/v1/generate took longer than 0\.5 s"):
        await client.generate(REQUEST)


async def test_a_stuck_control_call_is_given_up_in_bounded_time(standin: StandinEngine, client: EngineClient) -> None:
    standin.faults.steps["/pause"] = "hang"
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"POST /pause took longer than 0\.5 s"):
        await client.pause("keep")
    assert time.monotonic() - started < 3.0


async def test_a_missing_log_prob_never_becomes_a_number(standin: StandinEngine, client: EngineClient) -> None:
    standin.faults.num_null_log_probs = 1
    with pytest.raises(EngineError, match=r"answer can't be read.*logprob"):
        await client.generate(REQUEST)


async def test_a_refused_update_leaves_the_version(standin: StandinEngine, client: EngineClient) -> None:
    weights = [("a", torch.ones(3))]
    with WeightSender("127.0.0.1", 0, 2, timeout_s=5.0) as sender:
        publisher = Publisher(client, sender)
        await publisher.join()
        standin.faults.num_failed_updates = 1
        with pytest.raises(EngineError, match="POST /update_weights answered 500"):
            await publisher.transfer(weights)
        assert await client.weight_version() == 0
        assert await publisher.publish(weights) == 1


async def test_an_engine_that_is_gone_is_not_ready_and_named() -> None:
    async with EngineClient("http://127.0.0.1:9", control_timeout_s=0.5) as client:
        assert not await client.ready()
        with pytest.raises(EngineError, match=r"http://127.0.0.1:9: POST /resume failed: ClientConnectorError"):
            await client.resume()


async def test_a_cancelled_call_aborts_the_request(standin: StandinEngine, client: EngineClient) -> None:
    standin.faults.step_s = 0.05
    task = asyncio.create_task(client.generate(REQUEST))
    await asyncio.sleep(0.03)
    assert (await client.metrics()).num_running == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0.05)
    assert (await client.metrics()).num_running == 0


class TestAnswers:
    @staticmethod
    def body(log_prob: str = "-0.5", version: str = "3", stop: int = 1, reason: str = "stop") -> bytes:
        return (
            f'{{"choices": [{{"token_ids": [7], "finish_reason": "{reason}",'
            f' "logprobs": {{"content": [{{"token_id": 7, "logprob": {log_prob}}}]}},'
            f' "weight_versions": [{{"version": "{version}", "start": 0, "end": {stop}}}]}}]}}'
        ).encode()

    def test_a_whole_answer_is_read(self) -> None:
        result = decode_generate(self.body(), REQUEST)
        assert (result.token_ids, result.log_probs, result.num_cached_tokens) == ([7], [-0.5], 0)

    @pytest.mark.parametrize("log_prob", ["NaN", "-Infinity", "null", "-9999.0", "0.25", "-1e999"])
    def test_a_log_prob_that_is_no_log_prob_is_refused(self, log_prob: str) -> None:
        with pytest.raises(EngineError, match="request one"):
            decode_generate(self.body(log_prob), REQUEST)

    def test_spans_must_cover_the_tokens(self) -> None:
        with pytest.raises(EngineError, match="version spans cover 2 of 1 tokens"):
            decode_generate(self.body(stop=2), REQUEST)

    def test_a_foreign_version_label_is_refused(self) -> None:
        with pytest.raises(EngineError, match="weight version 'v3', allowed: a number"):
            decode_generate(self.body(version="v3"), REQUEST)
        assert parse_version("default") == 0

    def test_an_unknown_finish_reason_is_refused(self) -> None:
        with pytest.raises(EngineError, match="finish reason is 'error', allowed: stop, length, abort"):
            decode_generate(self.body(reason="error"), REQUEST)


def test_metrics_are_summed_over_engine_cores() -> None:
    text = (
        '# HELP vllm:num_requests_running x\nvllm:num_requests_running{engine="0"} 3.0\n'
        'vllm:num_requests_running{engine="1"} 2.0\nvllm:num_requests_waiting{engine="0"} 4.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0"} 9.0\nvllm:kv_cache_usage_perc{engine="0"} 0.25\n'
    )
    metrics = parse_metrics(text)
    assert (metrics.num_running, metrics.num_waiting, metrics.kv_cache_usage) == (5, 4, 0.25)


def test_versions_compare_by_their_first_two_numbers() -> None:
    assert version_at_least("0.32.0+cpu", (0, 32))
    assert version_at_least("1.0", (0, 32))
    assert not version_at_least("0.26.0", (0, 32))
    assert not version_at_least("dev", (0, 26))
