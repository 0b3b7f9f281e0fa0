"""The client against an engine that misbehaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
import torch

from tests.support.standin_engine import StandinEngine
from tests.vime.backends.vllm_utils.publications import Publisher
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.protocol import GenerateRequest, SampleColumns, Sampling, VersionSpan
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
    with pytest.raises(EngineError, match=r"POST /inference/v1/sample failed: ServerDisconnected") as error:
        await client.generate(REQUEST)
    assert standin.address in str(error.value)
    assert (await client.generate(REQUEST)).finish_reason == "length"


async def test_a_slow_engine_is_given_up_in_bounded_time(standin: StandinEngine, client: EngineClient) -> None:
    standin.faults.step_s = 5.0
    with pytest.raises(EngineError, match=r"/inference/v1/sample took longer than 0\.5 s"):
        await client.generate(REQUEST)


async def test_a_stuck_control_call_is_given_up_in_bounded_time(standin: StandinEngine, client: EngineClient) -> None:
    standin.faults.steps["/pause"] = "hang"
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"POST /pause took longer than 0\.5 s"):
        await client.pause("keep")
    assert time.monotonic() - started < 3.0


@pytest.mark.parametrize(
    ("has_columns", "message"),
    [(True, "log-probability of output token 1 is nan"), (False, "answer can't be read.*logprob")],
)
async def test_a_missing_log_prob_never_becomes_a_number(
    standin: StandinEngine, client: EngineClient, has_columns: bool, message: str
) -> None:
    standin.has_columns, standin.faults.num_null_log_probs = has_columns, 1
    with pytest.raises(EngineError, match=message):
        await client.generate(REQUEST)


async def test_an_engine_without_the_plug_in_serves_tokens_but_refuses_columns(
    standin: StandinEngine, client: EngineClient
) -> None:
    with_columns = await client.generate(REQUEST)
    standin.has_columns = False
    async with EngineClient(standin.address) as other:
        plain = await other.generate(REQUEST)
        assert (plain.token_ids, plain.log_probs) == (with_columns.token_ids, pytest.approx(with_columns.log_probs))
        with pytest.raises(EngineError, match=r"no route /inference/v1/sample, .*num_candidates=3"):
            await other.generate(replace(REQUEST, columns=SampleColumns(num_candidates=3)))
        assert not (await other.capabilities()).columns


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


async def test_a_version_that_vllm_does_not_know_of_is_kept_by_the_plug_in(
    standin: StandinEngine, client: EngineClient
) -> None:
    standin.keeps_version = True
    with WeightSender("127.0.0.1", 0, 2, timeout_s=5.0) as sender:
        publisher = Publisher(client, sender)
        await publisher.join()
        assert await publisher.publish([("a", torch.ones(3))]) == 1
    assert (standin.version, await client.weight_version()) == ("1", 1)
    assert (await client.generate(REQUEST)).version_spans == [VersionSpan(1, 0, 2)]


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
