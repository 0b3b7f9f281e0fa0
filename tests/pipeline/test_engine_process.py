"""An engine keeps its address over its processes; what doesn't stop in order is ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from ray.exceptions import RayActorError

from pipeline import engine_process
from pipeline.engine_process import EngineProcess
from pipeline.messages import Takeover, encode
from vime.errors import EngineStartError, RunFailedError

ADDRESS = "http://127.0.0.1:4000"


class Call:
    """`actor.method.remote(...)`."""

    def __init__(self, function: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self.remote = function


class Actor:
    """An engine's actor that starts at once, stops when told so, and can be dead or deaf."""

    def __init__(self, address: str = ADDRESS) -> None:
        self.address, self.is_dead, self.is_deaf = address, False, False
        self.ports: list[int] = []
        self.start, self.stop, self.watch, self.pids = map(Call, (self._start, self._stop, self._watch, self._pids))
        self.take_over = Call(self._live_on)

    async def _start(self, port: int) -> str:
        self.ports.append(port)
        return self.address

    async def _stop(self) -> None:
        self._live()
        if self.is_deaf:
            await asyncio.Event().wait()

    async def _watch(self) -> int:
        self._live()
        return 137

    async def _pids(self) -> list[int]:
        self._live()
        return [1, 2]

    async def _live_on(self) -> bytes:
        self._live()
        return encode(Takeover(3, ""))

    def _live(self) -> None:
        if self.is_dead:
            raise RayActorError(error_msg="The actor died.")


class Rig:
    def __init__(self, *actors: Actor, cleanup_timeout_s: float = 0.0) -> None:
        self.waiting, self.ended, self.num_restarts = list(actors), list[Actor](), 0
        self.node, self.moves_to = "first", ["first"]
        """Where engines start, and where they start after each time that a lost node is left."""
        self.engine = EngineProcess(
            "engine 0",
            "default",
            lambda: self.waiting.pop(0),
            self.ended.append,
            cleanup_timeout_s=cleanup_timeout_s,
            log_tail=lambda: ["out of memory"],
            on_restart=self.count,
            node=lambda: self.node,
            leave_lost_node=self.leave,
        )

    async def count(self) -> None:
        self.num_restarts += 1

    async def leave(self) -> None:
        self.node = self.moves_to.pop(0)


@pytest.fixture(autouse=True)
def short_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "STOP_MARGIN_S", 0.05)


@pytest.mark.parametrize("fault", ["none", "is_dead", "is_deaf"])
async def test_a_successor_starts_at_the_same_port_after_the_process_before_has_ended(fault: str) -> None:
    first, second = Actor(), Actor()
    rig = Rig(first, second)
    assert await rig.engine.start() == ADDRESS
    if fault != "none":
        setattr(first, fault, True)
    await rig.engine.restart()
    assert rig.ended == [first]
    assert (first.ports, second.ports) == ([0], [4000])
    assert rig.engine.actor is second
    assert rig.num_restarts == 1


async def test_an_engine_has_its_own_time_to_end_before_its_successors_start_counts_as_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_process, "START_S", 0.1)
    monkeypatch.setattr(engine_process, "TAKE_OVER_S", 0.1)
    slow = Actor()
    slow.start, slow.take_over = Call(lambda _port: late(ADDRESS)), Call(lambda: late(encode(Takeover(3, ""))))
    rig = Rig(slow, cleanup_timeout_s=5.0)
    assert (await rig.engine.take_over()).version == 3
    assert await rig.engine.start() == ADDRESS
    hasty = Rig(slow, cleanup_timeout_s=0.0)
    with pytest.raises(RunFailedError, match=r"engine 0 did not start within 0\.1 s"):
        await hasty.engine.start()


async def late(answer: Any) -> Any:
    await asyncio.sleep(0.3)
    return answer


async def test_a_successor_elsewhere_counts_as_one_that_did_not_start() -> None:
    rig = Rig(Actor(), Actor("http://127.0.0.1:5000"))
    await rig.engine.start()
    with pytest.raises(EngineStartError, match=r"started at http://127\.0\.0\.1:5000, expected http://127"):
        await rig.engine.restart()
    assert rig.num_restarts == 0


async def test_a_successor_on_another_node_has_an_address_of_its_own_also_when_its_first_start_fails() -> None:
    gone = Actor()
    gone.is_dead = True
    there = Actor("http://10.0.0.2:5000")
    rig = Rig(Actor(), gone, there)
    await rig.engine.start()
    rig.moves_to = ["second", "second"]
    gone.start = Call(lambda _port: gone._watch())
    with pytest.raises(EngineStartError, match="engine 0 died"):
        await rig.engine.restart()
    await rig.engine.restart()
    assert rig.engine.address == "http://10.0.0.2:5000"
    assert there.ports == [0], "the port before may be taken there"
    assert rig.num_restarts == 1


async def test_an_engine_that_no_node_has_room_for_counts_as_one_that_did_not_start() -> None:
    rig = Rig(Actor(), Actor())

    async def leave() -> None:
        raise RunFailedError("Engine 1 of 1 with 1 GPUs finds no room.")

    await rig.engine.start()
    rig.engine._leave_lost_node = leave
    with pytest.raises(EngineStartError, match="finds no room"):
        await rig.engine.restart()


async def test_the_end_of_an_engine_is_told_with_its_last_lines_and_that_of_its_actor_too() -> None:
    actor = Actor()
    rig = Rig(actor)
    assert await rig.engine.ended() == "Its process ended with status 137.\n  | out of memory"
    assert await rig.engine.pids() == [1, 2]
    actor.is_dead = True
    assert "engine 0 died." in await rig.engine.ended()
    assert await rig.engine.pids() == []
