"""`vime parity` with a real engine and a real trainer."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.jobs import Job

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.multiproc, pytest.mark.timeout(400)]


def parity(folder: Path, **flags: Any) -> subprocess.CompletedProcess[str]:
    job = Job(folder, flags={"--rollout-temperature": 0.7, "--vllm-block-size": 32, **flags})
    job.prepare()
    command = job.command()
    command[command.index("train")] = "parity"
    return subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=300)


def test_engine_and_trainer_agree(tmp_path: Path) -> None:
    done = parity(tmp_path)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert found["engine"] == "Engine 0"
    report = found["report"]
    assert report["num_tokens"] > 20
    assert report["gap"]["max"] < 1e-4
    assert report["fault"] is None
    assert not (tmp_path / "run").exists()


def test_an_engine_of_lower_precision_is_refused_above_the_threshold(tmp_path: Path) -> None:
    done = parity(tmp_path, **{"--vllm-dtype": "bfloat16", "--parity-threshold": 1e-5})
    assert done.returncode == 2
    assert "Engine 0 against the trainer on" in done.stderr
    assert "Allowed: a mean of 1e-05 (--parity-threshold)" in done.stderr
    assert json.loads(done.stdout)[0]["report"]["gap"]["mean"] > 1e-5
