"""One job on stand-in engines loses one process after the other, goes on, and has trained every group once."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from recovery.audit import audit_run
from tests.end_to_end.jobs import Job, kill, survivors, tree, wait_until

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(900)]

FLAGS = {"--parity-probes": 0, "--save-interval": 2}  # no trainer agrees with a stand-in


def start(job: Job) -> subprocess.Popen[str]:
    return subprocess.Popen(
        job.standin_command(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def newest(ids: Any) -> int:
    while isinstance(ids, list):
        ids = ids[-1]
    return int(ids)


def test_producer_coordinator_router_and_trainer_are_replaced_in_the_running_job(tmp_path: Path) -> None:
    job = Job(tmp_path, num_rollout=40, flags=FLAGS)
    job.prepare()
    running = start(job)
    wait_until(lambda: len(job.steps()) >= 3, running)
    for victim in ("producers", "coordinator", "routers", "trainers"):
        pid, before = newest(job.processes()[victim]), len(job.steps())
        kill(pid)
        wait_until(lambda before=before: len(job.steps()) >= before + 3, running)  # type: ignore[misc]
    processes = tree(running.pid)
    output, _ = running.communicate(timeout=600)
    assert running.returncode == 0, output
    assert "Producer 0 died and is replaced, restart 1 of 3." in output
    assert "The router of default ended with status -9 and is replaced, restart 1 of 3." in output
    assert "A trainer rank died: the ranks go back from rollout" in output
    assert "goes on with" in (job.run / "logs" / "coordinator.log").read_text()
    assert survivors(processes) == []
    report = audit_run(job.run)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], 40 * 8)
    versions = [step["policy_version"] for step in job.steps()]
    assert versions == sorted(versions)


def test_a_job_whose_reward_never_answers_says_who_waits_and_ends_with_status_5(tmp_path: Path) -> None:
    """Also, as in every job: the weights are published before the first batch is waited for."""
    flags = {**FLAGS, "--stall-after": 2, "--stall-timeout": 8, "--custom-rm-path": "tests.end_to_end.rewards.never"}
    job = Job(tmp_path, num_rollout=1, flags=flags)
    job.prepare()
    running = start(job)
    output, _ = running.communicate(timeout=600)
    assert running.returncode == 5, output
    assert output.index("Weights published as version 1") < output.index("No progress for")
    words = [json.loads(line)["words"] for line in (job.run / "stalls.jsonl").read_text().splitlines()]
    assert words[0].startswith("step 1 waits for 8 groups <- ")
    assert "in reward, oldest " in words[-1]
    assert "tests.end_to_end.rewards.never" in words[-1]
    quiet = [json.loads(line)["quiet_s"] for line in (job.run / "stalls.jsonl").read_text().splitlines()]
    assert quiet == sorted(quiet)
    assert len(quiet) >= 3
