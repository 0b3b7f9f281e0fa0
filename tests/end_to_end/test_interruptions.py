"""Kills, Ctrl-C and failed starts of a real job: it resumes, and nothing is left running."""

import os
import signal
from pathlib import Path

import pytest

from recovery.audit import audit_run
from recovery.commit import committed_rollouts
from tests.end_to_end.jobs import Job, kill, shared_memory, survivors, tree, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(600)]


def finish(job: Job) -> str:
    running = job.start()
    output, _ = running.communicate(timeout=300)
    assert running.returncode == 0, output
    return output


def test_ctrl_c_finishes_the_step_commits_and_a_resume_goes_on(tmp_path: Path) -> None:
    job = Job(tmp_path, num_rollout=6, flags={"--save-interval": 100})
    job.prepare()
    running = job.start()
    wait_until(lambda: len(job.steps()) >= 2, running)
    processes = tree(running.pid)
    os.killpg(running.pid, signal.SIGINT)
    output, _ = running.communicate(timeout=120)
    assert running.returncode == 130, output
    assert "Finishing the step, then committing" in output
    assert "run the same command again" in output
    assert survivors(processes) == []
    (committed,) = committed_rollouts(job.run)
    assert committed == job.steps()[-1]["rollout_id"]
    output = finish(job)
    assert f"Resuming from the commit of rollout {committed}" in output
    report = audit_run(job.run)
    assert (report.lost, report.trained_twice, report.rolled_back) == ([], [], 0)
    assert [step["rollout_id"] for step in job.steps()] == list(range(6))


def test_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    job = Job(tmp_path, num_rollout=200)
    job.prepare()
    running = job.start()
    wait_until(lambda: len(job.steps()) >= 1, running)
    processes = tree(running.pid)
    os.killpg(running.pid, signal.SIGINT)
    os.killpg(running.pid, signal.SIGINT)
    output, _ = running.communicate(timeout=60)
    assert running.returncode == 130, output
    assert survivors(processes) == []


@pytest.mark.parametrize("victim", ["driver", "engines"])
def test_kill_of_a_process_that_nobody_replaces_ends_the_job_and_a_resume_loses_nothing(
    tmp_path: Path, victim: str
) -> None:
    job = Job(tmp_path, num_rollout=5, flags={"--save-interval": 2})
    job.prepare()
    before = shared_memory()
    running = job.start()
    wait_until(lambda: len(job.steps()) >= 3, running)
    processes = tree(running.pid)
    ids = job.processes()[victim]
    while isinstance(ids, list):
        ids = ids[-1]  # of an engine: the server, not the actor that watches it
    kill(ids)
    output, _ = running.communicate(timeout=120)
    assert running.returncode == (-signal.SIGKILL if victim == "driver" else 4)
    if victim != "driver":
        assert "ended unexpectedly" in output or "died" in output, output
        assert "Next: " in output
    assert survivors(processes) == []
    assert shared_memory() - before == set()
    finish(job)
    report = audit_run(job.run)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], 5 * 8)


def test_engine_that_will_not_start_shows_its_last_lines_and_leaves_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, flags={"--vllm-kv-cache-dtype": "nonsense"})
    job.prepare()
    before = shared_memory()
    running = job.start()
    output, _ = running.communicate(timeout=200)
    assert running.returncode == 2
    assert "Last log lines" in output
    assert "nonsense" in output
    assert "Next: " in output
    assert shared_memory() - before == set()


def test_unknown_megatron_flag_names_the_nearest_one(tmp_path: Path) -> None:
    job = Job(tmp_path, flags={"--lr-warmup-iter": "3"})
    job.prepare()
    running = job.start()
    output, _ = running.communicate(timeout=200)
    assert running.returncode == 1
    assert "--lr-warmup-iters" in output


def test_a_finished_run_is_extended_by_a_larger_number_of_rollouts(tmp_path: Path) -> None:
    job = Job(tmp_path, num_rollout=2)
    job.prepare()
    finish(job)
    output = finish(Job(tmp_path, num_rollout=4))
    assert "Resuming from the commit of rollout 1" in output
    report = audit_run(job.run)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], 4 * 8)


def test_second_session_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    job = Job(tmp_path, num_rollout=200)
    job.prepare()
    first = job.start()
    try:
        wait_until(lambda: (job.run / "rollout" / "session.lock").exists(), first)
        second = job.start()
        output, _ = second.communicate(timeout=60)
        assert second.returncode == 1
        assert f"another session is running there (process {first.pid})" in output
    finally:
        os.killpg(first.pid, signal.SIGINT)
        first.communicate(timeout=60)
