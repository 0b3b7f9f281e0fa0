"""A run that is killed and resumed learns bit by bit what an unkilled one learns; commits may be made meanwhile."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recovery.audit import audit_run
from recovery.audit_parts import branch_limits, read_branches_raw, split_steps, training_steps
from recovery.commit import commit_path, committed_rollouts, read_commit
from tests.end_to_end.jobs import REPOSITORY, Job, run_with_standins, stored_samples, survivors, tree, wait_until
from tests.end_to_end.recorded_responses import FOLDER_VARIABLE
from tests.end_to_end.test_released_trainer import tensors
from vime.utils.kill_points import KILL_FILE_VARIABLE, KillPoint

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(600)]

ROLLOUTS = 5
LAST = f"iter_{ROLLOUTS - 1:07d}"
SYNCHRONOUS = {
    "--max-staleness": 0,
    "--flush-cache-interval": 1,
    "--rollout-batch-size": 4,
    "--trainer-num-threads": 1,
    "--parity-probes": 0,  # no trainer agrees with a stand-in
}


def job_in(folder: Path, *switches: str, **flags: Any) -> Job:
    """Each batch is sampled under the weights that it trains, each request with a seed of its sample's own."""
    folder.mkdir(exist_ok=True)
    job = Job(folder, ROLLOUTS, SYNCHRONOUS | flags, ("--vllm-enable-deterministic-inference", *switches))
    job.prepare()
    return job


def start(job: Job, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        job.standin_command(),
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=REPOSITORY,
        start_new_session=True,
    )


def kill_when(job: Job, condition: Callable[[], bool], *, after_s: float = 0.0, **variables: str) -> None:
    """Kill the whole tree of a job, `after_s` seconds after a condition."""
    running = start(job, **variables)
    wait_until(condition, running)
    time.sleep(after_s)
    processes = tree(running.pid)
    for process in processes:
        process.send_signal(signal.SIGKILL)
    running.communicate(timeout=60)
    assert survivors(processes) == []


def trained(run: Path) -> list[tuple[int, list[int]]]:
    """(rollout, sample ids in their order) along the newest branch."""
    log = list(training_steps(run))
    counted, _ = split_steps(log, branch_limits(read_branches_raw(run), log))
    return [(rollout, samples) for (_, rollout, _), _, samples in counted]


@pytest.mark.slow
def test_a_killed_and_resumed_run_learns_bit_by_bit_what_an_unkilled_one_learns(tmp_path: Path) -> None:
    whole, killed = (job_in(tmp_path / name, **{"--save-interval": 2}) for name in ("whole", "killed"))
    run_with_standins(whole)
    kill_when(killed, lambda: len(killed.steps()) >= 3)
    output = run_with_standins(killed)
    assert "Resuming from the commit of rollout 1" in output
    assert "Goes on with: generated" in output
    assert "Weights published as version" in output, "before any batch: requests start under a published version"
    assert trained(killed.run) == trained(whole.run)
    assert audit_run(killed.run).rolled_back > 0, "the kill came after a step that no commit has"
    assert differing(whole, killed) == []


@pytest.mark.slow
@pytest.mark.engine
def test_with_recorded_responses_a_run_killed_at_any_moment_has_the_parameters_of_an_unkilled_one(
    tmp_path: Path,
) -> None:
    """What a real engine said is played to a run that is killed and to one that is not, of one rank in fp32."""
    recorded = tmp_path / "recorded"
    dumps = {"--save-debug-rollout-data": recorded / "{rollout_id}.pt", "--save-interval": ROLLOUTS}
    recording = job_in(tmp_path / "recording", **dumps)
    said = recording.start().communicate(timeout=300)[0]
    assert sorted(path.name for path in recorded.iterdir()) == [f"{n}.pt" for n in range(ROLLOUTS)], said
    played = {"--custom-generate-function-path": "tests.end_to_end.recorded_responses.play", "--save-interval": 2}
    whole, killed = (job_in(tmp_path / name, **played) for name in ("whole", "killed"))
    variables = {FOLDER_VARIABLE: str(recorded)}
    run_with_standins(whole, **variables)
    num_steps, after_s = random.randrange(1, ROLLOUTS), random.uniform(0.0, 0.3)
    kill_when(killed, lambda: len(killed.steps()) >= num_steps, after_s=after_s, **variables)
    run_with_standins(killed, **variables)
    moment = f"killed {after_s:.3f} s after step {num_steps}"
    assert trained(killed.run) == trained(whole.run) == trained(recording.run), moment
    assert responses(whole) == responses(recording), "nothing else was trained than what was recorded"
    assert differing(whole, killed) == [], moment
    assert {tensor.dtype for name, tensor in tensors(whole.run / LAST) if "weight" in name} == {torch.float32}


def differing(one: Job, other: Job) -> list[str]:
    """Tensors of model and optimizer that are not the same bit for bit in the last checkpoints of two runs."""
    expected, found = (dict(tensors(job.run / LAST)) for job in (one, other))
    assert expected.keys() == found.keys()
    return [key for key in expected if not torch.equal(expected[key], found[key])]


def responses(job: Job) -> dict[int | None, tuple[list[int], list[float] | None]]:
    """Of each sample its tokens and the engine's log-probabilities."""
    return {sample.index: (sample.tokens, sample.rollout_log_probs) for sample in stored_samples(job)}


@pytest.mark.slow
def test_commits_in_the_background_are_whole_and_said_only_when_they_are_on_disk(tmp_path: Path) -> None:
    job = job_in(tmp_path, "--async-save", **{"--keep-checkpoints": 2})
    output = run_with_standins(job)
    lines = output.splitlines()
    for rollout in range(ROLLOUTS):
        copied = next(n for n, line in enumerate(lines) if f"Copied rollout {rollout} in" in line)
        committed = next(n for n, line in enumerate(lines) if f"Committed rollout {rollout} in" in line)
        assert copied < committed, "also of the first save"
    assert committed_rollouts(job.run) == [ROLLOUTS - 2, ROLLOUTS - 1]
    for rollout in committed_rollouts(job.run):
        read_commit(commit_path(job.run, rollout))
    report = audit_run(job.run)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], ROLLOUTS * 4)


@pytest.mark.slow
@pytest.mark.parametrize("point", [KillPoint.BEFORE_SAVE, KillPoint.BEFORE_COMMIT])
def test_a_kill_while_a_commit_is_written_in_the_background_resumes_from_the_one_before(
    tmp_path: Path, point: KillPoint
) -> None:
    job = job_in(tmp_path, "--async-save")
    asked = tmp_path / "kill"
    running = start(job, **{KILL_FILE_VARIABLE: str(asked)})
    wait_until(lambda: committed_rollouts(job.run) == [0, 1], running)
    processes = tree(running.pid)
    asked.write_text(point.value)
    wait_until(lambda: asked.with_suffix(".taken").exists() or running.poll() is not None, running)
    for process in processes:
        if process.is_running():
            process.send_signal(signal.SIGKILL)
    said = running.communicate(timeout=60)[0]
    newest = committed_rollouts(job.run)[-1]
    assert f"Committed rollout {newest + 1} " not in said
    output = run_with_standins(job)
    assert f"Resuming from the commit of rollout {newest} (newest)" in output
    report = audit_run(job.run)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], ROLLOUTS * 4)
    assert json.loads((job.run / "rollout" / "current.json").read_bytes())["tracker"] == str(ROLLOUTS - 1)
