"""Trainer and engines that share devices have their memory by turns.

While the trainer trains, engines sleep: their requests are ended, their keys and values forgotten, and their weights in
host memory, so that an engine whose publication fails still has those that it had. A publication brings weights back
first, and the room for keys and values when the trainer has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Protocol

from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.protocol import EngineMemory
from vime.settings.groups import ClusterSettings

_EVERYTHING: frozenset[EngineMemory] = frozenset({"weights", "kv_cache"})


class TurnTakers(Protocol):
    """The trainer's ranks, and the producers' side."""

    async def rest_trainers(self) -> None:
        """Leave the devices' memory until there is work again."""
        ...

    async def pause_admission(self) -> None: ...
    async def resume_admission(self, policy_version: int, serving: list[str]) -> None: ...


class MemoryTurns:
    """Whose turn it is. Where nobody leaves the memory, all is as without it."""

    def __init__(self, cluster: ClusterSettings, takers: TurnTakers) -> None:
        self._engines_sleep, self._trainer_rests = cluster.engines_leave_memory, cluster.trainer_leaves_memory
        self._shares, self._takers = cluster.colocate, takers
        self._engines: list[SleepingEngine] = []
        self._trainer_is_in = True
        self._leaving = asyncio.Lock()

    def engine(self, address: str) -> EngineClient:
        """A client of an engine, which wakes it when a publication reaches it."""
        if not self._engines_sleep:
            return EngineClient(address)
        engine = SleepingEngine(address, self.trainer_leaves)
        self._engines.append(engine)
        return engine

    async def start_both(
        self, start_engines: Callable[[], Awaitable[list[str]]], start_trainers: Callable[[], Awaitable[object]]
    ) -> list[str]:
        """Start engines and trainer; base URLs. On shared devices engines come last: they take what is left."""
        if not self._shares:
            addresses, _ = await asyncio.gather(start_engines(), start_trainers())
            return addresses
        await start_trainers()
        await self.trainer_leaves()
        return await start_engines()

    async def trainer_leaves(self) -> None:
        """The trainer's memory goes to the host, unless it is there."""
        async with self._leaving:
            if self._trainer_rests and self._trainer_is_in:
                await self._takers.rest_trainers()
            self._trainer_is_in = False

    async def give_to_trainer(self) -> None:
        """No request starts any more, those that run are ended, and every engine sleeps.

        Raises:
            EngineError: an engine keeps its memory, which the trainer needs.
        """
        if self._engines_sleep:
            await self._takers.pause_admission()
            await asyncio.gather(*(engine.fall_asleep() for engine in self._engines))
        self._trainer_is_in = True

    @asynccontextmanager
    async def lent_to_trainer(self, version: int, serving: Collection[str]) -> AsyncIterator[None]:
        """The trainer has the memory in the body; then the engines at these addresses serve `version` on."""
        if not self._engines_sleep:
            yield
            return
        await self.give_to_trainer()
        yield
        await asyncio.gather(*(engine.resume() for engine in self._engines if engine.address in serving))
        await self._takers.resume_admission(version, sorted(serving))


class SleepingEngine(EngineClient):
    """An engine whose memory is the trainer's now and then; whoever publishes need not know."""

    def __init__(self, address: str, make_room: Callable[[], Awaitable[None]]) -> None:
        """`make_room` returns when the engine may have all its memory."""
        super().__init__(address)
        self._make_room = make_room
        self._asleep: frozenset[EngineMemory] = frozenset()

    async def fall_asleep(self) -> None:
        """End what runs, and sleep. An engine that a publication has left half awake wakes first."""
        if self._asleep == _EVERYTHING:
            return
        await self._wake(self._asleep)
        await self.pause("abort")
        await self.sleep()
        self._asleep = _EVERYTHING

    async def start_weight_update(self) -> None:
        """Open an update, once there are weights to change."""
        await self._wake(self._asleep & {"weights"})
        await super().start_weight_update()

    async def finish_weight_update(self, version: int) -> None:
        """Close the update; all engines have loaded, so the trainer may leave."""
        await super().finish_weight_update(version)
        await self._make_room()

    async def resume(self) -> None:
        """Go on, with all memory."""
        if self._asleep:
            await self._make_room()
            await self._wake(self._asleep)
        await super().resume()

    async def _wake(self, parts: frozenset[EngineMemory]) -> None:
        if parts:
            await self.wake_up(sorted(parts))
            self._asleep -= parts
