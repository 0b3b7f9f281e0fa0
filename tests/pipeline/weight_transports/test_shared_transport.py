"""Weights in shared memory: copied beside models part by part while engines sample, or loaded so while they stand."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from pipeline.weight_transports.shared import SharedTransport
from pipeline.weight_transports.transport import Deadline
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.updates import FromShared, LoadShared, LoadStaged, StageStatus, Update
from vime.errors import EngineError

NUM_PARTS = 3


class Source:
    """A trainer whose one buffer is filled with part after part."""

    def __init__(self, said: list[str]) -> None:
        self._said, self._next = said, 0

    async def share_next_part(self, version: int) -> dict[str, object] | None:
        number, self._next = self._next, self._next + 1
        if number == NUM_PARTS:
            self._next = 0
            return None
        self._said.append(f"fill {number}")
        part = {"version": version, "handles": {}, "meta_bytes": 0, "num_bytes": 10}
        return {"type": "shared", "first": number == 0, "last": number == NUM_PARTS - 1, **part}

    async def stop_sharing(self) -> None:
        self._said.append("stop")
        self._next = 0


class Engine:
    def __init__(self, name: str, said: list[str]) -> None:
        self.address, self._said = name, said
        self.fails_at: int | None = None
        self.is_there = True
        self._num_parts = self._polls = 0
        self.loaded: list[Update] = []

    async def stage_weights(self, request: FromShared) -> None:
        if self._num_parts == self.fails_at:
            raise EngineError("no memory is left")
        self._num_parts, self._polls = self._num_parts + 1, 0
        self._version = request.version

    async def staging(self) -> list[StageStatus]:
        self._polls += 1
        if self._polls < 2:
            return [StageStatus(self._version, "running")]
        self._said.append(f"{self.address} has {self._num_parts - 1}")
        return [StageStatus(self._version, "staged")]

    async def weight_version(self) -> int:
        if not self.is_there:
            raise EngineError("it is gone")
        return 3

    async def update_weights(self, update: Update) -> None:
        self.loaded.append(update)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def engines(said: list[str]) -> list[Engine]:
    return [Engine("a", said), Engine("b", said)]


def clients(engines: list[Engine]) -> list[EngineClient]:
    return cast(Any, engines)


async def test_the_buffer_is_filled_again_when_every_engine_has_copied_the_part_before(
    engines: list[Engine], said: list[str]
) -> None:
    transport = SharedTransport(Source(said), stages=True)
    prepared = await transport.prepare(4, clients(engines), full=False, deadline=Deadline(10))
    assert (prepared.failures, prepared.wire_bytes, transport.stages) == ({}, 30, True)
    rounds = [said[start : start + 3] for start in range(0, 9, 3)]
    assert [(filled, sorted(copied)) for filled, *copied in rounds] == [
        (f"fill {number}", [f"a has {number}", f"b has {number}"]) for number in range(NUM_PARTS)
    ]
    assert await transport.load(4, clients(engines), Deadline(10)) == {}
    assert [engine.loaded for engine in engines] == [[LoadStaged(4)]] * 2


async def test_an_engine_without_room_is_named_and_later_versions_are_loaded_as_they_come(
    engines: list[Engine], said: list[str]
) -> None:
    engines[1].fails_at = 1
    transport = SharedTransport(Source(said), stages=True)
    prepared = await transport.prepare(4, clients(engines), full=False, deadline=Deadline(10))
    assert list(prepared.failures) == ["b"]
    assert "no memory is left" in prepared.failures["b"]
    assert said[-1] == "stop"
    assert await transport.load(4, clients(engines[:1]), Deadline(10)) == {}
    assert engines[0].loaded == [LoadStaged(4)], "who has it loads it"
    engines[0].loaded.clear()
    prepared = await transport.prepare(5, clients(engines), full=False, deadline=Deadline(10))
    assert (prepared.failures, prepared.wire_bytes, transport.stages) == ({}, 0, False)
    assert await transport.load(5, clients(engines), Deadline(10)) == {}
    for engine in engines:
        assert all(isinstance(update, LoadShared) for update in engine.loaded)
        assert len(engine.loaded) == NUM_PARTS


async def test_the_death_of_an_engine_says_nothing_of_the_others_room(engines: list[Engine], said: list[str]) -> None:
    engines[1].fails_at, engines[1].is_there = 1, False
    transport = SharedTransport(Source(said), stages=True)
    prepared = await transport.prepare(4, clients(engines), full=False, deadline=Deadline(10))
    assert list(prepared.failures) == ["b"]
    said.clear()
    await transport.prepare(5, clients(engines[:1]), full=False, deadline=Deadline(10))
    assert sum(word.startswith("a has") for word in said) == NUM_PARTS, "it is brought beside the model again"


async def test_engines_that_may_be_new_get_a_new_buffer_and_others_keep_theirs(said: list[str]) -> None:
    transport = SharedTransport(Source(said))
    await transport.prepare(1, [], full=False, deadline=Deadline(5.0))
    assert said == []
    await transport.prepare(2, [], full=True, deadline=Deadline(5.0))
    assert said == ["stop"]


async def test_a_version_whose_time_is_over_is_gathered_to_its_end(engines: list[Engine], said: list[str]) -> None:
    has_begun = asyncio.Event()

    async def hang() -> list[StageStatus]:
        has_begun.set()
        await asyncio.Event().wait()
        return []

    cast(Any, engines[0]).staging = hang
    transport = SharedTransport(Source(said), stages=True)
    preparing = asyncio.create_task(transport.prepare(4, clients(engines), full=False, deadline=Deadline(600)))
    await has_begun.wait()
    preparing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await preparing
    assert said[-1] == "stop", "else the ranks would gather on while the next batch is trained"
