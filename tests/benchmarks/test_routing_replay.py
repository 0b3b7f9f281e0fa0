"""What routing replay is for: the trainer comes nearer to a sampler of lower precision."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_replay_of_stored_routes_cuts_the_distance_to_a_bf16_sampler_at_least_threefold() -> None:
    command = [sys.executable, "-m", "benchmarks.routing_replay", "--json"]
    output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    values = json.loads(output.splitlines()[-1])["values"]
    assert values["max_gap"]["median"] > 0.1, "without replay the two must differ, or there is nothing to cut"
    assert values["max_gap_cut"]["median"] >= 3
    assert values["k3_gap_cut"]["median"] >= 3
