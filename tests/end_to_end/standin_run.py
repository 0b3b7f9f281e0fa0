"""`vime train` with stand-in engines: python -m tests.end_to_end.standin_run FLAGS. Everything else is real."""

from __future__ import annotations

import asyncio
import os
import sys

import msgspec

import pipeline.workers
from pipeline.run_folder import RunFolder
from tests.support.standin_engine import StandinEngine
from tests.support.tiny_models import VOCAB_SIZE
from vime.cli.main import main
from vime.settings.groups import Settings


class StandinEngineActor:
    """What `pipeline.actors.EngineActor` is to the driver."""

    def __init__(self, settings: bytes, number: int, places: bytes) -> None:
        del places
        folder = RunFolder.of(msgspec.msgpack.decode(settings, type=Settings))
        self._events = folder.log(f"engine_{number}_events")
        self._engine = StandinEngine(VOCAB_SIZE, 64)

    async def start(self) -> str:
        self._engine.__enter__()
        self._engine.faults.step_s = 0.01
        return self._engine.address

    async def progress(self) -> str:
        return "ready"

    async def pids(self) -> list[int]:
        return [os.getpid()]

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def stop(self) -> None:
        self._engine.__exit__(None, None, None)
        self._events.write_text("".join(f"{event}\n" for event in self._engine.events))


if __name__ == "__main__":
    # Ray finds the class by its module, which has another name here.
    from tests.end_to_end.standin_run import StandinEngineActor as Actor

    pipeline.workers.EngineActor = Actor  # type: ignore[misc, assignment]
    sys.exit(main(["train", *sys.argv[1:]]))
