"""The client of an engine whose memory is the trainer's now and then."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable

from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.protocol import EngineMemory

_EVERYTHING: frozenset[EngineMemory] = frozenset({"weights", "kv_cache"})


class Process(enum.Enum):
    """What there is of an engine's process."""

    RUNS = "it runs, and sleeps or wakes when told to"
    CHANGES = "it ends or starts, and may hold memory"
    GONE = "there is none"


class SleepingEngine(EngineClient):
    """Wakes the engine when a publication reaches it, so that whoever publishes need not know."""

    def __init__(
        self,
        address: str,
        make_room: Callable[[], Awaitable[None]],
        *,
        is_asleep: bool = False,
        is_trained: bool = True,
    ) -> None:
        """`make_room` returns when the engine may have all its memory."""
        super().__init__(address)
        self._make_room, self.is_trained = make_room, is_trained
        self._asleep = _EVERYTHING if is_asleep else frozenset[EngineMemory]()
        self.turn = asyncio.Lock()
        """Held by whoever has it fall asleep, or wakes it for requests."""
        self.process = Process.RUNS
        self.num_starts = 0
        """Processes that took the place of another."""
        self.is_awake, self.num_sleeps = not is_asleep, 0

    def starts_asleep(self) -> None:
        """Another process has taken the engine's place, and sleeps."""
        self._asleep, self.is_awake = _EVERYTHING, False
        self.num_starts += 1
        self.num_sleeps += 1

    async def fall_asleep(self) -> None:
        """Sleep. An engine that a publication has left half awake wakes first.

        A trained one ends what runs. One that isn't answers it first: nobody asks it again, as its answers are scores
        and verdicts on responses that are there.
        """
        if self._asleep == _EVERYTHING:
            return
        self.is_awake = False
        self.num_sleeps += 1
        await self._wake(self._asleep)
        if self.is_trained:
            await put_to_sleep(self)
        else:
            await self.finish_requests()
            await self.sleep("wait")
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
        self.is_awake = True

    async def _wake(self, parts: frozenset[EngineMemory]) -> None:
        if parts:
            await self.wake_up(sorted(parts))
            self._asleep -= parts


async def put_to_sleep(engine: EngineClient) -> None:
    """End what runs on an engine that is awake, and have it leave its memory."""
    await engine.pause("abort")
    await engine.sleep()
