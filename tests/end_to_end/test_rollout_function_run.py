"""A job whose rollouts are made by a function of the user's own, which wraps vime's; engines are stand-ins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recovery.audit import audit_run
from tests.end_to_end import own_hooks
from tests.end_to_end.jobs import Job, run_with_standins

pytestmark = [pytest.mark.slow, pytest.mark.multiproc, pytest.mark.timeout(600)]


def test_rollouts_of_an_own_function_are_filtered_trained_and_resumed(tmp_path: Path) -> None:
    flags = {
        "--parity-probes": 0,  # no trainer agrees with a stand-in
        "--rollout-function-path": f"{own_hooks.__name__}.rollout",
        "--dynamic-sampling-filter-path": f"{own_hooks.__name__}.keep_even",
        "--rollout-all-samples-process-path": f"{own_hooks.__name__}.note_all",
        "--over-sampling-batch-size": 12,
        "--flush-cache-interval": 1,
    }
    job = Job(tmp_path, num_rollout=2, flags=flags)
    job.prepare()
    run_with_standins(job)
    run_with_standins(Job(tmp_path, num_rollout=3, flags={**flags, "--load": job.run}))
    assert [step["rollout_id"] for step in job.steps()] == [0, 1, 2]
    asked = [json.loads(line) for line in (job.run / "rollouts.jsonl").read_text().splitlines()]
    assert [number for number, _ in asked][:2] == [0, 1]
    assert 2 in [number for number, _ in asked]
    assert all(version >= 1 for _, version in asked)
    seen = [json.loads(line) for line in (job.run / "groups.jsonl").read_text().splitlines()]
    assert {size for _, size in seen} == {64}
    assert any(group % 2 for groups, _ in seen for group in groups)
    report = audit_run(job.run)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], 24)
    assert report.dropped.keys() == {"filter_rejected"}
