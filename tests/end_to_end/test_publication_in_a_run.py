"""Publications of whole runs: trainer, queue, producers and Ray are real, engines are stand-ins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recovery.audit import audit_run
from tests.end_to_end.jobs import Job, run_with_standins, stored_samples
from tests.end_to_end.standin_run import DIES_VARIABLE
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


def test_a_run_trains_on_while_it_publishes_under_the_versions_of_one_that_waits(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"--parity-probes": 0, "--update-weights-while-training": "on", "--save-interval": 2}
    job = Job(tmp_path, num_rollout=5, flags=flags)
    job.prepare()
    run_with_standins(job)
    steps = job.steps()
    assert [step["policy_version"] for step in steps] == [1, 2, 3, 4, 5]
    assert [step["update_weights_wire_bytes"] > 0 for step in steps] == [False, True, True, True, True]
    assert all(step["publication_s"] > 0 for step in steps[1:])
    report = audit_run(job.run)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], 5 * 8)
    assert max(version for s in stored_samples(job) for version, _, _ in s.version_spans) <= 5


def test_an_engine_that_dies_is_replaced_and_serves_again_with_the_current_version(tmp_path: Path) -> None:
    flags: dict[str, Any] = {
        "--parity-probes": 0,
        "--rollout-health-check-interval": 1,
        "--rollout-health-check-timeout": 5,
        "--rollout-health-check-first-wait": 1,
        "--rollout-cleanup-timeout": 2,
    }
    job = Job(tmp_path, num_rollout=6, flags=flags, switches=("--use-fault-tolerance",))
    job.prepare()
    output = run_with_standins(job, **{DIES_VARIABLE: "0.5"})
    assert "engine 0 (http://" in output
    assert "restart 1 of 3." in output
    assert "serves again, with version" in output
    assert [step["rollout_id"] for step in job.steps()] == list(range(6))
    assert job.steps()[-1]["dropped"] == {}
    report = audit_run(job.run)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], 6 * 8)
    versions = {version for s in stored_samples(job) for version, _, _ in s.version_spans}
    assert min(versions) == 1 < max(versions), "a number that the death has spoiled is left out"


def test_a_frozen_model_of_the_file_teaches_the_trained_one_through_its_own_router(tmp_path: Path) -> None:
    job = Job(tmp_path, num_rollout=2, switches=("--use-opd",))
    groups = tmp_path / "groups.yaml"
    groups.write_text(
        f"vllm:\n- name: ref\n  model_path: {job.model}\n  update_weights: false\n"
        "  server_groups: [{worker_type: regular, num_gpus: 1}, {worker_type: placeholder, num_gpus: 1}]\n"
        "- name: actor\n  server_groups: [{worker_type: regular, num_gpus: 1, overrides: {max_model_len: 64}}]\n"
    )
    job.flags |= {
        "--vllm-config": groups,
        "--parity-probes": 0,
        "--opd-type": "vllm",
        "--opd-teacher-model": "ref",
        "--vllm-max-model-len": None,
    }
    job.prepare()
    output = run_with_standins(job)
    assert output.index("Router of actor: http://") < output.index("Router of ref: http://")
    samples = stored_samples(job)
    assert len(samples) >= 2 * 8 * 4
    assert all(len(sample.teacher_log_probs or []) == sample.response_length > 0 for sample in samples)
    assert {version for sample in samples for version, _, _ in sample.version_spans} <= {1, 2}
    assert (job.run / "logs" / "engine_2_events.log").exists(), "engine 1 is the placeholder"
    assert not (job.run / "logs" / "engine_1_events.log").exists()
