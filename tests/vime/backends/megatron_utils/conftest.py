"""Processes that hold a Megatron trainer. Importing Megatron takes seconds, so one world serves a whole module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.worlds import RankFailedError, run_scenarios


@pytest.fixture(scope="session")
def run_world(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Run scenarios of a worker script on a number of ranks; returns {scenario: what rank 0 found}."""

    def run(
        world_size: int, scenarios: list[str], worker: str = "megatron_worker.py", timeout_s: float = 240
    ) -> dict[str, Any]:
        if 0 < torch.cuda.device_count() < world_size:
            pytest.skip(f"{world_size} ranks need as many GPUs, found {torch.cuda.device_count()}")
        try:
            return run_scenarios(tmp_path_factory.mktemp("world"), world_size, scenarios, worker, timeout_s)
        except RankFailedError as error:
            pytest.fail(str(error))

    return run
