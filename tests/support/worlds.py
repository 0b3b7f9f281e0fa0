"""Ranks of a trainer in processes of their own, which run scenarios of a worker script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
WORKERS = REPOSITORY / "tests" / "vime" / "backends" / "megatron_utils"


class RankFailedError(Exception):
    """A rank ended with an error; the message ends with its last lines."""


def run_scenarios(
    folder: Path, world_size: int, scenarios: Sequence[str], worker: str, timeout_s: float
) -> dict[str, Any]:
    """Run `scenarios` of a worker on a number of ranks; what rank 0 found in each.

    Raises `RankFailedError`, and `subprocess.TimeoutExpired` when a rank takes longer than `timeout_s`.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(WORKERS), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world_size):
            command = [sys.executable, str(WORKERS / worker), str(folder), str(rank), str(world_size), *scenarios]
            with (folder / f"rank{rank}.log").open("w") as log:
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        for rank, process in enumerate(processes):
            if process.wait(timeout=timeout_s) != 0:
                raise RankFailedError(f"rank {rank} failed:\n" + (folder / f"rank{rank}.log").read_text()[-4000:])
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in scenarios}
