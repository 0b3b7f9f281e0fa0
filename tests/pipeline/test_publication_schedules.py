"""Publications under thousands of random schedules: every one ends in time, and leaves everybody knowing where he is.

Engines here are state machines in this process, and time is virtual: a wait costs nothing but its number.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar, cast

import pytest

from pipeline.publisher import WeightPublisher
from pipeline.weight_transports.transport import Deadline, Failures, Prepared, on_each
from vime.backends.vllm_utils.client import EngineClient
from vime.errors import EngineError, PublicationError

_Result = TypeVar("_Result")

TIMEOUT_S = 100.0
SETTLE_S = 10.0
NUM_PUBLICATIONS = 4


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """When everybody waits, the clock jumps to the first who goes on."""

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        ready, scheduled = cast(Any, self)._ready, cast(Any, self)._scheduled
        if not ready and scheduled:
            self.now = max(self.now, scheduled[0]._when)
        super()._run_once()  # type: ignore[misc]


class Chance:
    """Random delays, and now and then a fault."""

    def __init__(self, seed: int, fault_share: float) -> None:
        self._random, self._fault_share = random.Random(seed), fault_share

    def half(self) -> bool:
        return self._random.random() < 0.5

    async def pass_by(self) -> None:
        await asyncio.sleep(self._random.choice([0.0, 0.0, 0.01, 1.0, 5.0]))

    async def call(self, name: str) -> bool:
        """Delay, then fail, hang, or go on; True when the answer is lost after the work."""
        await self.pass_by()
        if self._random.random() >= self._fault_share:
            return False
        kind = self._random.choice(["error", "hang", "lost"])
        if kind == "hang":
            await asyncio.sleep(10_000.0)
        if kind == "error":
            raise EngineError(f"{name} was told to fail")
        return True


class Engine:
    """What a publisher sees of an engine."""

    def __init__(self, address: str, chance: Chance, *, can_swap: bool) -> None:
        self.address, self._chance, self._can_swap = address, chance, can_swap
        self.paused = self.open = self.staged = self.loaded = False
        self.version = 0
        self.weights: int | str = 0

    async def _do(self, name: str, **changes: object) -> None:
        lost = await self._chance.call(name)
        vars(self).update(changes)
        await self._chance.pass_by()
        if lost:
            raise EngineError(f"the answer to {name} was lost")

    async def weight_version(self) -> int:
        await self._do("weight_version")
        return self.version

    async def pause(self, mode: str, *, timeout_s: float) -> None:  # noqa: ARG002
        await self._do("pause", paused=True)

    async def reset_prefix_cache(self, *, reset_running: bool, timeout_s: float) -> None:  # noqa: ARG002
        await self._do("reset_prefix_cache")

    async def start_weight_update(self) -> None:
        await self._do("start_weight_update", open=True)

    async def load(self, version: int) -> None:
        assert self.paused, "a model is never changed while it samples"
        self.weights = "a mix"
        await self._do("update_weights", weights=version)

    async def finish_weight_update(self, version: int) -> None:
        assert self.weights == version, "a version is never raised on other weights"
        await self._do("finish_weight_update", version=version)

    async def swaps(self) -> bool:
        await self._do("swaps")
        return self._can_swap

    async def swap_weights(self, version: int) -> None:
        assert self._can_swap
        try:
            await self._do("swap", weights=version, version=version)
        except EngineError:
            if self.weights != version and self._chance.half():
                self.weights, self.paused = "a mix", True
            raise

    async def swap_time_s(self) -> float:
        await self._do("swap_time")
        return 0.001

    async def abort_all(self) -> None:
        await self._do("abort")

    async def resume(self) -> None:
        assert self.weights != "a mix", "an engine in doubt never samples"
        await self._do("resume", paused=False)


class Transport:
    """Stages and loads by calls of the engines."""

    stages = True

    def __init__(self, chance: Chance) -> None:
        self._chance = chance

    async def prepare(
        self,
        version: int,  # noqa: ARG002
        engines: Sequence[EngineClient],
        *,
        full: bool,  # noqa: ARG002
        deadline: Deadline,
    ) -> Prepared:
        try:
            await self._chance.call("writing")
        except EngineError as error:
            raise PublicationError(str(error)) from error
        staging = [cast(Engine, engine)._do("stage") for engine in engines]
        return Prepared(await on_each(engines, "staging on", staging, deadline))

    async def load(self, version: int, engines: Sequence[EngineClient], deadline: Deadline) -> Failures:
        return await on_each(engines, "loading on", [cast(Engine, e).load(version) for e in engines], deadline)

    async def finished(self, version: int, *, published: bool) -> None:  # noqa: ARG002
        await self._chance.pass_by()


class Admission:
    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self.is_open = False
        self.longest_closed_s = self._closed_at = 0.0
        self.serving: list[str] = []

    async def pause_admission(self) -> None:
        await self._chance.pass_by()
        self.is_open, self._closed_at = False, asyncio.get_running_loop().time()

    async def resume_admission(self, policy_version: int, serving: list[str]) -> None:  # noqa: ARG002
        await self._chance.pass_by()
        self.is_open, self.serving = True, serving
        self.longest_closed_s = max(self.longest_closed_s, asyncio.get_running_loop().time() - self._closed_at)


async def one_schedule(seed: int, fault_share: float) -> str:
    """Some publications; how the last of them ended."""
    chance = Chance(seed, fault_share)
    loop = asyncio.get_running_loop()
    engines = [Engine(f"engine-{number}", chance, can_swap=(seed + number) % 3 > 0) for number in range(3)]
    admission = Admission(chance)
    publisher = WeightPublisher(
        cast(list[EngineClient], engines),
        Transport(chance),
        admission,
        start_version=0,
        flush_interval=2,
        timeout_s=TIMEOUT_S,
    )
    last = 0
    for _ in range(NUM_PUBLICATIONS):
        started = loop.time()
        try:
            publication = await publisher.publish()
        except PublicationError:
            return "ended"
        finally:
            assert loop.time() - started <= TIMEOUT_S + 8 * SETTLE_S
        assert publication.version >= last, "versions never go back"
        last = publication.version
        assert admission.is_open
        assert set(admission.serving) | set(publication.fenced) == {engine.address for engine in engines}
        for engine in engines:
            if engine.address in admission.serving:
                assert (engine.weights, engine.version) == (last, last)
                assert not engine.paused
    assert admission.longest_closed_s <= TIMEOUT_S + 8 * SETTLE_S
    return "published"


def run_virtually(work: Coroutine[Any, Any, _Result]) -> _Result:
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


@pytest.fixture(autouse=True)
def virtual_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Deadline` and the publisher's times follow the loop's clock."""

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return asyncio.get_running_loop().time()

    monkeypatch.setattr("pipeline.weight_transports.transport.time", Clock)
    monkeypatch.setattr("pipeline.publisher.time", Clock)


async def many_schedules(seeds: range) -> dict[str, int]:
    ends: dict[str, int] = {}
    for seed in seeds:
        end = await one_schedule(seed, fault_share=[0.0, 0.02, 0.1, 0.3][seed % 4])
        ends[end] = ends.get(end, 0) + 1
    return ends


def check(ends: dict[str, int], num_schedules: int) -> None:
    assert sum(ends.values()) == num_schedules
    assert ends["published"] > num_schedules // 4
    assert ends["ended"] > 0


def test_no_schedule_of_delays_and_faults_is_without_progress() -> None:
    check(run_virtually(many_schedules(range(100))), 100)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_schedule_of_ten_thousand_is_without_progress() -> None:
    check(run_virtually(many_schedules(range(100, 10_100))), 10_000)
