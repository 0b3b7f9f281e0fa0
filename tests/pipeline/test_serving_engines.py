"""Which engines get requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import cast

import pytest

from pipeline.serving_engines import ServingEngines
from vime.backends.vllm_utils.client import EngineClient
from vime.errors import GenerationAborted


@dataclass(eq=False)
class Named:
    address: str


def three() -> tuple[ServingEngines, list[EngineClient]]:
    engines = cast(list[EngineClient], [Named("a"), Named("b"), Named("c")])
    return ServingEngines(engines), engines


def test_groups_are_shared_out_among_the_engines_that_serve() -> None:
    serving, (a, b, c) = three()
    assert [serving.of_group(group) for group in range(4)] == [a, b, c, a]
    serving.serve(["c", "a"])
    assert {serving.of_group(group) for group in range(6)} == {a, c}
    serving.serve(["a", "b", "c"])
    assert [serving.of_group(group) for group in range(3)] == [a, b, c]


async def test_a_run_without_engines_works_without_one() -> None:
    serving = ServingEngines([])
    serving.serve([])
    assert serving.of_group(3) is None
    assert await serving.request(None, asyncio.sleep(0, "record")) == "record"


async def test_requests_to_an_engine_that_serves_no_more_are_given_back() -> None:
    serving, (a, b, _) = three()
    endless, short = asyncio.Event(), asyncio.sleep(0.01, "answer")
    lost = asyncio.create_task(serving.request(b, endless.wait()))
    kept = asyncio.create_task(serving.request(a, short))
    await asyncio.sleep(0)
    serving.serve(["a", "c"])
    with pytest.raises(GenerationAborted, match="engine b gets no requests any more"):
        await lost
    assert await kept == "answer"


async def test_a_cancelled_caller_is_not_told_that_its_engine_was_fenced() -> None:
    serving, (_, b, _) = three()
    ended = asyncio.Event()

    async def wait_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    caller = asyncio.create_task(serving.request(b, wait_for_ever()))
    await asyncio.sleep(0.01)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set(), "the request itself ends too"
