"""Clients of a session's engines."""

from __future__ import annotations

from pipeline.engine_group import EngineGroup
from pipeline.memory_turns import MemoryTurns
from vime.backends.vllm_utils.client import EngineClient


class EngineClients:
    """One for each engine, from when all have started until `close`."""

    def __init__(self) -> None:
        self.trained: list[EngineClient] = []
        self.frozen: list[EngineClient] = []
        """Of the engines that aren't trained."""

    def open(self, engines: EngineGroup, turns: MemoryTurns) -> None:
        """Make them, once all engines have started; those of engines that sleep now and then wake them."""
        taken_over = engines.taken_over
        self.trained += [turns.engine(each, is_asleep=each in taken_over) for each in engines.trained]
        self.frozen += [turns.engine(each, is_asleep=each in taken_over, is_trained=False) for each in engines.frozen]

    async def close(self) -> None:
        for client in (*self.trained, *self.frozen):
            await client.close()
