"""Which engines get requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import cast

import pytest

from pipeline.serving_engines import ServingEngines
from vime.backends.vllm_utils.client import EngineClient
from vime.errors import EngineUnavailable, GenerationAborted


@dataclass(eq=False)
class Named:
    address: str

    def move(self, address: str) -> None:
        self.address = address


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


def test_an_engine_that_went_to_another_node_serves_at_its_new_address() -> None:
    serving, (a, b, c) = three()
    serving.serve(["a", "c"])
    serving.move("b", "n")
    serving.serve(["a", "n", "c"])
    assert [serving.of_group(group) for group in range(3)] == [a, b, c]
    assert b.address == "n"


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


@dataclass(eq=False)
class Checked:
    """An engine whose checks fail when it is broken."""

    address: str
    is_broken: bool

    async def check(self, _timeout_s: float) -> None:
        if self.is_broken:
            raise EngineUnavailable("answered 500")


async def failing_request() -> None:
    raise EngineUnavailable("the connection was reset")


async def test_a_request_that_fails_for_its_engines_sake_is_given_back_and_the_engine_suspected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipeline.serving_engines.GIVE_BACK_S", 0.0)
    a, b = cast(list[EngineClient], [Checked("a", False), Checked("b", True)])
    serving = ServingEngines([a, b], are_replaced=True)
    with pytest.raises(GenerationAborted, match="the connection was reset"):
        await serving.request(b, failing_request())
    assert await serving.suspects() == ["b"]
    with pytest.raises(EngineUnavailable):
        await serving.request(a, failing_request())  # a engine that is well has refused the request


async def test_requests_of_an_engine_that_was_fenced_meanwhile_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.serving_engines.GIVE_BACK_S", 0.05)
    a, b = cast(list[EngineClient], [Checked("a", False), Checked("b", False)])
    serving = ServingEngines([a, b], are_replaced=True)
    lost = asyncio.create_task(serving.request(b, failing_request()))
    await asyncio.sleep(0.01)
    serving.serve(["a"])
    with pytest.raises(GenerationAborted):
        await lost


def test_while_no_engine_serves_no_request_is_begun() -> None:
    serving, _ = three()
    serving.serve([])
    with pytest.raises(GenerationAborted, match="no engine serves"):
        serving.of_group(0)
