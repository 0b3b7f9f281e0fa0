"""Publications of whole runs: trainer, queue, producers and Ray are real, engines are stand-ins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.jobs import Job, run_with_standins
from vime.backends.vllm_utils.disk.mirror import HostMirror

pytestmark = [pytest.mark.slow, pytest.mark.multiproc, pytest.mark.timeout(300)]


def test_a_run_publishes_its_changes_through_disk_to_two_engines(tmp_path: Path) -> None:
    published, local = tmp_path / "published", tmp_path / "local"
    flags: dict[str, Any] = {
        "--rollout-num-gpus": 2,
        "--parity-probes": 0,  # no trainer agrees with a stand-in
        "--update-weight-mode": "delta",
        "--update-weight-transport": "disk",
        "--update-weight-disk-dir": published,
        "--update-weight-local-checkpoint-dir": local,
        "--update-weight-delta-encoding": "overwrite",
        "--update-weights-interval": 2,
    }
    job = Job(tmp_path, num_rollout=5, flags=flags)
    job.prepare()
    output = run_with_standins(job)
    assert "Weights published as version 1" in output
    steps = job.steps()
    assert [step["policy_version"] for step in steps] == [1, 1, 2, 2, 3]
    assert HostMirror(local).version == 3
    assert (local / "current" / "config.json").exists()
    assert list(published.iterdir()) == [], "what both engines have loaded is deleted"
