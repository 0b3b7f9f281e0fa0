"""Runs whose trainer and engines take turns on the same devices."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from recovery.audit import audit_run
from tests.end_to_end.jobs import REPOSITORY, Job, kill, run_with_standins, stored_samples, wait_until
from tests.end_to_end.standin_run import DIES_VARIABLE

pytestmark = [pytest.mark.slow, pytest.mark.multiproc, pytest.mark.timeout(400)]

NUM_ROLLOUTS = 3
ON_GPU = torch.cuda.is_available()


def colocated(folder: Path, *switches: str, **flags: object) -> Job:
    job = Job(folder, NUM_ROLLOUTS, {"--flush-cache-interval": 1, **flags}, ("--colocate", *switches))
    job.prepare()
    return job


def finished(argv: list[str]) -> str:
    """Output of a run; fails with it when the run fails."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=380, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_turns(job: Job) -> None:
    """Each batch was trained on samples that the newest weights made alone."""
    assert [step["policy_version"] for step in job.steps()] == list(range(1, NUM_ROLLOUTS + 1))
    versions = [{span[0] for span in sample.version_spans} for sample in stored_samples(job)]
    per_batch = len(versions) // NUM_ROLLOUTS
    for number in range(NUM_ROLLOUTS):
        assert versions[number * per_batch : (number + 1) * per_batch] == [{number + 1}] * per_batch


@pytest.mark.parametrize("released", [False, True])
def test_engines_sleep_through_every_batch_and_each_batch_is_of_the_newest_weights(
    tmp_path: Path, released: bool
) -> None:
    flags: dict[str, object] = {"--parity-probes": 0}  # no trainer agrees with a stand-in
    if released:
        flags |= {"--update-weight-transport": "disk", "--update-weight-disk-dir": tmp_path / "versions"}
    job = colocated(tmp_path, *(("--release-train",) if released else ()), **flags)
    finished(job.standin_command())
    check_turns(job)
    events = (job.run / "logs" / "engine_0_events.log").read_text().splitlines()
    turn = ["sleep", "wake weights", "load", "wake kv_cache"]
    assert events == [*turn * NUM_ROLLOUTS, "sleep"], "nothing is published after the last batch"


def test_a_frozen_teacher_sleeps_in_the_trainers_turn_and_scores_every_response_as_it_was(tmp_path: Path) -> None:
    groups = tmp_path / "groups.yaml"
    job = colocated(
        tmp_path,
        "--use-opd",
        **{
            "--vllm-config": groups,
            "--parity-probes": 0,
            "--opd-type": "vllm",
            "--opd-teacher-model": "ref",
            "--actor-num-gpus-per-node": 2,
            "--prometheus-port": 0,
        },
    )
    groups.write_text(
        f"vllm:\n- name: ref\n  model_path: {job.model}\n  update_weights: false\n"
        "  server_groups: [{worker_type: regular, num_gpus: 1}]\n"
        "- name: actor\n  server_groups: [{worker_type: regular, num_gpus: 1}]\n"
    )
    running = job.start_with_standins()
    targets = job.run / "prometheus"
    wait_until(lambda: bool(job.steps()), running)
    assert {path.stem for path in targets.glob("engine_*.json")} == {"engine_0", "engine_1"}
    output, _ = running.communicate(timeout=300)
    assert running.returncode == 0, output
    check_turns(job)
    samples = stored_samples(job)
    assert all(len(sample.teacher_log_probs or []) == sample.response_length > 0 for sample in samples)
    frozen, trained = (
        (job.run / "logs" / f"engine_{number}_events.log").read_text().splitlines() for number in range(2)
    )
    assert frozen == [*["sleep", "wake kv_cache weights"] * NUM_ROLLOUTS, "sleep"]
    assert trained == [*["sleep", "wake weights", "load", "wake kv_cache"] * NUM_ROLLOUTS, "sleep"]


@pytest.mark.engine
def test_a_real_engine_and_a_trainer_of_two_ranks_take_turns(tmp_path: Path) -> None:
    job = colocated(
        tmp_path,
        **{"--actor-num-gpus-per-node": 1 if ON_GPU else 2, "--rollout-num-gpus": 1},
    )
    output = finished(job.command())
    check_turns(job)
    assert "Engine 0 against the trainer on" in output


@pytest.mark.parametrize("num_engines", [1, 2])
def test_an_engine_that_dies_comes_back_with_the_weights_of_a_turn_and_each_batch_is_of_the_newest(
    tmp_path: Path, num_engines: int
) -> None:
    flags = {"--parity-probes": 0, "--rollout-num-gpus": num_engines, "--rollout-cleanup-timeout": 2}
    job = colocated(tmp_path, "--use-fault-tolerance", **flags)
    output = run_with_standins(job, **{DIES_VARIABLE: "0.05"})
    assert "restart 1 of 3." in output
    assert "serves again, with version" in output
    report = audit_run(job.run)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], NUM_ROLLOUTS * 8)
    assert job.steps()[-1]["dropped"] == {}
    versions = [{span[0] for span in sample.version_spans} for sample in stored_samples(job)]
    assert all(len(found) == 1 for found in versions), "no response goes on under other weights"
    assert [step["policy_version"] for step in job.steps()] == sorted(step["policy_version"] for step in job.steps())


@pytest.mark.engine
def test_a_real_engine_that_is_killed_in_its_turn_comes_back_with_the_trainers_weights(tmp_path: Path) -> None:
    job = colocated(tmp_path, "--use-fault-tolerance", **{"--rollout-num-gpus": 1, "--rollout-cleanup-timeout": 5})
    running = job.start()
    wait_until(lambda: len(job.steps()) >= 1, running)
    kill(job.processes()["engines"][0][-1])
    output, _ = running.communicate(timeout=300)
    assert running.returncode == 0, output
    assert "restart 1 of 3. Its process ended with status" in output
    assert "serves again, with version" in output
    report = audit_run(job.run)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], NUM_ROLLOUTS * 8)
    assert all(step["train"]["train_rollout_logprob_abs_diff"] < 1e-3 for step in job.steps())


@pytest.mark.gpu
@pytest.mark.engine
@pytest.mark.parametrize("switches", [(), ("--no-offload-train", "--no-offload-rollout")])
def test_on_one_gpu_the_engine_leaves_its_cache_to_the_trainer_unless_both_stay(
    tmp_path: Path, switches: tuple[str, ...]
) -> None:
    flags = {"--rollout-num-gpus": 1, "--vllm-kv-cache-memory-bytes": 4 << 30, "--max-staleness": 0}
    job = colocated(tmp_path, "--vllm-enforce-eager", *switches, **flags)
    output = finished(job.command())
    check_turns(job)
    assert "Engine 0 against the trainer on" in output
    slept = [
        float(freed)
        for freed in re.findall(r"leep mode freed ([0-9.]+) GiB", (job.run / "logs" / "engine_0.log").read_text())
    ]
    assert bool(slept) is not bool(switches)
    assert all(freed > 3.8 for freed in slept)
