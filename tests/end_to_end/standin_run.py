"""`vime train` with stand-in engines: python -m tests.end_to_end.standin_run FLAGS. Everything else is real.

With `VIME_TEST_ENGINE_DIES_AFTER_S` the process of engine 0 ends so many seconds after its first version, once.
With `VIME_TEST_ENGINE_FORGETS_ROUTES_EVERY` each so many answers of an engine come without the routes asked for.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import msgspec

import pipeline.engine_group
from pipeline.preview.passed_value import passed_value
from pipeline.run_folder import RunFolder
from tests.support.standin_engine import StandinEngine
from tests.support.tiny_models import VOCAB_SIZE
from vime.backends.vllm_utils.listening import claim_port
from vime.cli.main import main
from vime.settings.groups import Settings

DIES_VARIABLE = "VIME_TEST_ENGINE_DIES_AFTER_S"
FORGETS_VARIABLE = "VIME_TEST_ENGINE_FORGETS_ROUTES_EVERY"


class StandinEngineActor:
    """What `pipeline.actors.engine.EngineActor` is to the driver."""

    def __init__(self, settings: bytes, number: int, engine: bytes) -> None:
        del engine
        decoded = msgspec.msgpack.decode(settings, type=Settings)
        folder = RunFolder.of(decoded)
        self._events = folder.log(f"engine_{number}_events")
        self._has_died = folder.root / "has_died"
        self._number = number
        self._engine = StandinEngine(
            VOCAB_SIZE,
            int(passed_value(decoded.vllm_args, "--vllm-max-model-len") or 64),
            num_workers=decoded.cluster.rollout_num_gpus_per_engine,
        )
        if drafting := passed_value(decoded.vllm_args, "--vllm-speculative-config"):
            self._engine.num_drafted = json.loads(drafting)["num_speculative_tokens"]

    async def start(self, port: int = 0) -> str:
        self._engine.port = port
        if port:
            await asyncio.to_thread(claim_port, "127.0.0.1", port, 30.0)
        self._engine.__enter__()
        self._engine.faults.step_s = 0.01
        self._engine.faults.forgets_routes_every = int(os.environ.get(FORGETS_VARIABLE, 0)) or None
        return self._engine.address

    async def progress(self) -> str:
        return "ready"

    async def pids(self) -> list[int]:
        return [os.getpid()]

    async def watch(self) -> None:
        if self._number != 0 or DIES_VARIABLE not in os.environ or self._has_died.exists():
            await asyncio.Event().wait()
        while self._engine.version == "default":
            await asyncio.sleep(0.01)
        await asyncio.sleep(float(os.environ[DIES_VARIABLE]))
        self._has_died.touch()
        os._exit(9)

    async def stop(self) -> None:
        if self._engine.address:
            self._engine.__exit__(None, None, None)
        self._events.write_text("".join(f"{event}\n" for event in self._engine.events))


if __name__ == "__main__":
    # Ray finds the class by its module, which has another name here.
    from tests.end_to_end.standin_run import StandinEngineActor as Actor

    pipeline.engine_group.EngineActor = Actor  # type: ignore[misc, assignment]
    sys.exit(main(["train", *sys.argv[1:]]))
