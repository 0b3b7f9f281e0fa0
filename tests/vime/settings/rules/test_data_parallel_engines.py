"""An engine of several data-parallel ranks can't be paused rank by rank."""

from __future__ import annotations

import pytest

from vime.settings.parse import parse_settings
from vime.settings.refusals import refused
from vime.settings.rules import RULES


@pytest.mark.parametrize("gpus_per_engine", ["1", "2"])
def test_data_parallel_engines_are_refused_before_a_pause_could_hang(gpus_per_engine: str) -> None:
    argv = [
        "--vllm-data-parallel-size",
        "2",
        "--rollout-num-gpus",
        "2",
        "--rollout-num-gpus-per-engine",
        gpus_per_engine,
    ]
    settings = parse_settings(argv)
    told = refused(settings) + [str(problem) for rule in RULES for problem in rule(settings)]
    assert any("--vllm-data-parallel-size 2" in words and "gines" in words for words in told)
