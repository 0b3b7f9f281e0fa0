"""Engines outlive a driver that is killed or stopped, serve the next one, and end by themselves without it."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from pipeline.kept_engines import kept_on_disk
from recovery.audit import audit_run
from tests.end_to_end.jobs import Job, survivors, tree, wait_until
from vime.backends.vllm_utils.supervisor import descendants

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(900)]

FLAGS = {"--parity-probes": 0, "--rollout-session-id": "nightly", "--rollout-cleanup-timeout": 2}


def start(job: Job) -> subprocess.Popen[str]:
    return job.started(job.command_of("tests.end_to_end.kept_standin_run"))


def kept(job: Job) -> list[int]:
    """Supervisors and engines."""
    supervisors = kept_on_disk(job.run / "rollout" / "kept_engines").running.values()
    return [pid for supervisor in supervisors for pid in (supervisor, *descendants(supervisor))]


def kill_all_but_kept(running: subprocess.Popen[str]) -> str:
    """Kept engines are nobody's children. What the run said."""
    for process in tree(running.pid):
        process.kill()
    return running.communicate(timeout=30)[0]


def routers(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("Router: ")]


def test_a_killed_and_a_stopped_driver_leave_engines_that_the_next_one_goes_on_with(tmp_path: Path) -> None:
    job = Job(tmp_path, num_rollout=40, flags=FLAGS)
    job.prepare()
    running = start(job)
    wait_until(lambda: len(job.steps()) >= 3, running)
    engines = kept(job)
    assert len(engines) == 2
    first_output = kill_all_but_kept(running)
    assert kept(job) == engines

    trained = len(job.steps())
    running = start(job)
    wait_until(lambda: len(job.steps()) >= trained + 3, running)
    assert kept(job) == engines, "the same processes"
    assert job.processes()["engines"][0][-1] == engines[0]
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=120)
    assert routers(output) == routers(first_output) != []
    assert "1 engine kept from the session before, with version" in output
    assert "1 engine (engine_0) kept for a restart with --rollout-session-id nightly, at most 600 s" in output
    assert kept(job) == engines

    job.flags, job.num_rollout = {**FLAGS, "--vllm-max-model-len": 63}, len(job.steps()) + 2
    running = start(job)
    output, _ = running.communicate(timeout=300)
    assert running.returncode == 0, output
    assert "Engine 0 was kept, and is replaced: extra_args was" in output
    assert survivors([psutil.Process(pid) for pid in engines if psutil.pid_exists(pid)], timeout_s=5) == []
    assert kept(job) == []
    assert list((job.run / "rollout" / "kept_engines").iterdir()) == []
    report = audit_run(job.run)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], job.num_rollout * 8)
    versions = [step["policy_version"] for step in job.steps()]
    assert versions == sorted(versions)


def test_a_kept_engine_that_shares_a_trainers_memory_sleeps_before_the_next_one_starts(tmp_path: Path) -> None:
    job = Job(tmp_path, num_rollout=40, flags={**FLAGS, "--flush-cache-interval": 1}, switches=("--colocate",))
    job.prepare()
    running = start(job)
    wait_until(lambda: len(job.steps()) >= 2, running)
    engines = kept(job)
    kill_all_but_kept(running)
    trained = len(job.steps())
    job.num_rollout = trained + 2
    running = start(job)
    output, _ = running.communicate(timeout=300)
    assert running.returncode == 0, output
    assert "1 engine kept from the session before, with version" in output
    assert survivors([psutil.Process(pid) for pid in engines if psutil.pid_exists(pid)], timeout_s=5) == []
    report = audit_run(job.run)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], job.num_rollout * 8)


def test_engines_to_which_nobody_comes_back_end_within_their_time(tmp_path: Path) -> None:
    job = Job(tmp_path, num_rollout=40, flags={**FLAGS, "--rollout-session-timeout": 4})
    job.prepare()
    running = start(job)
    wait_until(lambda: len(job.steps()) >= 1, running)
    engines = [psutil.Process(pid) for pid in kept(job)]
    kill_all_but_kept(running)
    killed_at = time.monotonic()
    assert survivors(engines, timeout_s=30) == []
    assert 2 < time.monotonic() - killed_at < 15
    assert "no driver has renewed its lease for 4 s" in (job.run / "logs" / "engine_0.log").read_text()
