"""Trainer and engines that share devices have their memory by turns.

While the trainer trains, engines sleep: their requests are ended, their keys and values forgotten, and their weights in
host memory, so that an engine whose publication fails still has those that it had. A publication brings weights back
first, and the room for keys and values when the trainer has left.

Engines that aren't trained have nothing to load. They sleep after what they were asked, and wake when the trainer has
left, before requests start.

An engine that is replaced starts while the trainer is out, and sleeps until a publication wakes it; one that isn't
trained wakes as soon as the trainer is out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Protocol

from pipeline.sleeping_engine import Process, SleepingEngine, put_to_sleep
from vime.backends.vllm_utils.client import EngineClient
from vime.errors import EngineError
from vime.settings.groups import ClusterSettings


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
        self.engines_sleep, self._trainer_rests = cluster.engines_leave_memory, cluster.trainer_leaves_memory
        self._shares, self._takers = cluster.colocate, takers
        self._engines: list[SleepingEngine] = []
        self._trainer_is_in = True
        self._leaving = asyncio.Lock()
        self._changed = asyncio.Condition()
        """Told when the trainer has left, and when an engine's process has changed."""
        self.replace_engine: Callable[[str, str], None] | None = None
        """Asks for another process for the engine at an address, with the reason, in a run that replaces engines."""

    def engine(self, address: str, *, is_asleep: bool = False, is_trained: bool = True) -> EngineClient:
        """A client of an engine, which wakes it when a publication reaches it."""
        if not self.engines_sleep:
            return EngineClient(address)
        engine = SleepingEngine(address, self.trainer_leaves, is_asleep=is_asleep, is_trained=is_trained)
        self._engines.append(engine)
        return engine

    def sleeping(self, address: str) -> SleepingEngine:
        """The client that `engine` has made for the engine at this address."""
        return next(engine for engine in self._engines if engine.address == address)

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
            async with self._changed:
                self._trainer_is_in = False
                self._changed.notify_all()

    async def give_to_trainer(self) -> None:
        """No request starts any more, those that run are over, and every engine sleeps or has ended.

        One that is starting is waited for. One that keeps its memory is replaced, in a run that replaces engines.

        Raises:
            EngineError: an engine keeps its memory, which the trainer needs.
        """
        self._trainer_is_in = True
        if self.engines_sleep:
            await self._takers.pause_admission()
            await asyncio.gather(*(self._empty(engine) for engine in self._engines))

    @asynccontextmanager
    async def lent_to_trainer(self, version: int, serving: Collection[str]) -> AsyncIterator[None]:
        """The trainer has the memory in the body; then the engines at these addresses serve `version` on.

        Those that were replaced meanwhile don't: they hold other weights.
        """
        if not self.engines_sleep:
            yield
            return
        before = [(engine, engine.num_starts) for engine in self._engines if engine.address in serving]
        await self.give_to_trainer()
        yield
        await self.trainer_leaves()
        await asyncio.gather(*(self._resume(engine, num_starts) for engine, num_starts in before))
        serving = [engine.address for engine, num_starts in before if _is_same(engine, num_starts) and engine.is_awake]
        await self.serve(version, serving)

    @asynccontextmanager
    async def lent_to_engines(self) -> AsyncIterator[None]:
        """The trainer is out in the body, so that engines can start; then it has the memory again."""
        if not self.engines_sleep:
            yield
            return
        await self.trainer_leaves()
        yield
        await self.give_to_trainer()

    async def serve(self, version: int, serving: Collection[str]) -> None:
        """Requests start under `version` at the engines with these addresses, when all are awake; see `wake`."""
        if self.engines_sleep:
            await self.wake(serving)
            await self._takers.resume_admission(version, sorted(serving))

    async def wake(self, serving: Collection[str] = ()) -> None:
        """The trainer is out; awake are the engines that aren't trained, and those at the addresses `serving`.

        One that stays asleep is replaced, in a run that replaces engines.

        Raises:
            EngineError: an engine stays asleep.
        """
        if self.engines_sleep:
            asked = [engine for engine in self._engines if not engine.is_trained or engine.address in serving]
            sleeping = [(engine, engine.num_starts) for engine in asked if not engine.is_awake]
            await self.trainer_leaves()
            await asyncio.gather(*(self._resume(engine, num_starts) for engine, num_starts in sleeping))

    async def runs_anew(self, address: str, now_at: str) -> None:
        """An engine that isn't trained has another process, `now_at` this address; it wakes if the trainer is out."""
        if self.engines_sleep:
            engine = self.sleeping(address)
            engine.move(now_at)
            await self._resume(engine, engine.num_starts)

    async def end_engine(self, engine: SleepingEngine, stop: Callable[[], Awaitable[None]]) -> None:
        """End an engine's process by `stop`; it holds no memory afterwards."""
        await self._note(engine, Process.CHANGES)
        await stop()
        await self._note(engine, Process.GONE)

    async def replace_process(
        self, engine: SleepingEngine, stop: Callable[[], Awaitable[None]], start: Callable[[], Awaitable[str]]
    ) -> None:
        """End an engine's process at once, start another when the trainer is out, and have that one sleep.

        `start` returns the other's address; `engine` is told of it by whoever readmits it.

        Raises:
            EngineError: it did not start or fall asleep; no process is left.
        """
        await self.end_engine(engine, stop)
        async with self._changed:
            await self._changed.wait_for(lambda: not self._trainer_is_in)
            engine.process = Process.CHANGES
        try:
            async with EngineClient(await start()) as successor:
                await put_to_sleep(successor)
        except EngineError:
            await self.end_engine(engine, stop)
            raise
        engine.starts_asleep()
        await self._note(engine, Process.RUNS)

    async def _empty(self, engine: SleepingEngine) -> None:
        """Until the engine holds none of the memory that the trainer needs."""
        if engine.process is Process.RUNS:
            try:
                async with engine.turn:
                    await engine.fall_asleep()
                return
            except EngineError as error:
                if self.replace_engine is None:
                    raise
                if engine.process is Process.RUNS:
                    self.replace_engine(engine.address, f"It keeps its memory. {error.message}")
                    await self._until(lambda: engine.process is not Process.RUNS)
        await self._until(lambda: engine.process is not Process.CHANGES)

    async def _resume(self, engine: SleepingEngine, num_starts: int) -> None:
        """Have an engine go on that is the same process; one that can't is replaced, in a run that replaces engines."""
        try:
            async with engine.turn:
                if self._trainer_is_in or not _is_same(engine, num_starts):
                    return
                await engine.resume()
        except EngineError as error:
            if self.replace_engine is None:
                raise
            if _is_same(engine, num_starts):
                self.replace_engine(engine.address, error.message)

    async def _until(self, is_true: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(is_true)

    async def _note(self, engine: SleepingEngine, process: Process) -> None:
        async with self._changed:
            engine.process = process
            self._changed.notify_all()


def _is_same(engine: SleepingEngine, num_starts: int) -> bool:
    """Whether the engine's process runs, and is that after so many starts."""
    return engine.process is Process.RUNS and engine.num_starts == num_starts
