"""A job whose prompts, rewards and their post-processing are all the user's own, for two epochs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recovery.audit import audit_run
from tests.end_to_end import own_hooks
from tests.end_to_end.jobs import Job

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.multiproc, pytest.mark.timeout(600)]
BATCH = 8


def test_own_source_reward_and_post_processing_make_two_epochs(tmp_path: Path) -> None:
    job = Job(
        tmp_path,
        flags={
            "--prompt-data": None,
            "--label-key": None,
            "--num-rollout": None,
            "--num-epoch": 2,
            "--data-source-path": f"{own_hooks.__name__}.Source",
            "--custom-rm-path": f"{own_hooks.__name__}.share_of_digits",
            "--custom-reward-post-process-path": f"{own_hooks.__name__}.shifted",
            "--rollout-batch-size": BATCH,
        },
    )
    job.prepare()
    running = job.start()
    output, _ = running.communicate(timeout=540)
    assert running.returncode == 0, output
    steps = job.steps()
    rollouts = 2 * (own_hooks.NUM_PROMPTS // BATCH)
    assert len(steps) == rollouts
    assert all(100 <= step["reward_mean"] < 101 and list(step["reward_by_source"]) == ["own"] for step in steps)
    report = audit_run(job.run)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], rollouts * BATCH)
    assert json.loads((job.run / f"place_{rollouts - 1}.json").read_text()) >= rollouts * BATCH
