"""An engine as `pipeline.engine_health` keeps it, whose memory is the trainer's now and then."""

from __future__ import annotations

from pipeline.engine_health import KeptEngine
from pipeline.memory_turns import MemoryTurns
from pipeline.sleeping_engine import SleepingEngine
from vime.errors import EngineError


class EngineInTurns:
    """Is checked only while it is awake, and started again only while the trainer is out."""

    def __init__(self, engine: KeptEngine, turns: MemoryTurns) -> None:
        self._engine, self._turns = engine, turns
        self.name, self.address = engine.name, engine.address

    async def ended(self) -> str:
        """Until the process ends; how it ended."""
        return await self._engine.ended()

    async def check(self, timeout_s: float) -> None:
        """As the engine's own. One that sleeps, or falls asleep meanwhile, passes: it samples nothing."""
        client = self._client
        num_sleeps = client.num_sleeps
        if not client.is_awake:
            return
        try:
            await self._engine.check(timeout_s)
        except EngineError:
            if client.num_sleeps == num_sleeps:
                raise

    async def stop(self) -> None:
        """End the process; the trainer may have its memory."""
        await self._turns.end_engine(self._client, self._engine.stop)

    async def restart(self) -> None:
        """End the process at once, and start another when the trainer is out; it sleeps until a publication."""
        await self._turns.replace_process(self._client, self._engine.stop, self._start)
        self.address = self._engine.address

    @property
    def _client(self) -> SleepingEngine:
        return self._turns.sleeping(self.address)

    async def _start(self) -> str:
        await self._engine.restart()
        return self._engine.address


def kept_in_turns(turns: MemoryTurns, engine: KeptEngine) -> KeptEngine:
    """What watches over the engine should see of it."""
    return EngineInTurns(engine, turns) if turns.engines_sleep else engine
