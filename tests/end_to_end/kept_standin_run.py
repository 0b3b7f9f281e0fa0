"""`vime train` whose engines' command is a stand-in: python -m tests.end_to_end.kept_standin_run FLAGS.

Unlike `tests.end_to_end.standin_run` each engine is a process of its own, started, kept and found as real ones are.
"""

from __future__ import annotations

import sys

import pipeline.engine_group
from pipeline.actors.engine import EngineActor
from vime.backends.vllm_utils import server
from vime.backends.vllm_utils.launch import EngineCommand, EngineLaunch
from vime.cli.main import main


def standin_command(launch: EngineLaunch) -> EngineCommand:
    return EngineCommand((sys.executable, "-m", "tests.support.standin_server", str(launch.port)), {})


class StandinProcessActor(EngineActor):
    """Starts stand-ins."""

    def __init__(self, settings: bytes, number: int, engine: bytes) -> None:
        server.engine_command = standin_command
        super().__init__(settings, number, engine)


if __name__ == "__main__":
    # Ray finds the class by its module, which has another name here.
    from tests.end_to_end.kept_standin_run import StandinProcessActor as Actor

    pipeline.engine_group.EngineActor = Actor  # type: ignore[misc]
    sys.exit(main(["train", *sys.argv[1:]]))
