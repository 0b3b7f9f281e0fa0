"""Processes that hold a Megatron trainer. Importing Megatron takes seconds, so one world serves a whole module."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[3]


@pytest.fixture(scope="session")
def run_world(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Run scenarios of a worker script on a number of ranks; returns {scenario: what rank 0 found}."""

    def run(
        world_size: int, scenarios: list[str], worker: str = "megatron_worker.py", timeout_s: float = 240
    ) -> dict[str, Any]:
        if 0 < torch.cuda.device_count() < world_size:
            pytest.skip(f"{world_size} ranks need as many GPUs, found {torch.cuda.device_count()}")
        folder = tmp_path_factory.mktemp("world")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(HERE), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        processes = []
        try:
            for rank in range(world_size):
                command = [sys.executable, str(HERE / worker), str(folder), str(rank), str(world_size)]
                log = (folder / f"rank{rank}.log").open("w")
                processes.append(
                    subprocess.Popen([*command, *scenarios], env=environment, stdout=log, stderr=subprocess.STDOUT)
                )
            for rank, process in enumerate(processes):
                if process.wait(timeout=timeout_s) != 0:
                    pytest.fail(f"rank {rank} failed:\n" + (folder / f"rank{rank}.log").read_text()[-4000:])
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        return {name: json.loads((folder / f"{name}.json").read_text()) for name in scenarios}

    return run
