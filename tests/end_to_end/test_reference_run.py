"""A run of `vime train` that starts at its reference model, which then follows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from recovery.commit import committed_rollouts
from tests.end_to_end.jobs import Job
from tests.support.tiny_models import build_tiny_qwen3

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("job")
    flags = {
        "--ref-load": build_tiny_qwen3(folder / "reference", seed=7, init_std=0.08),
        "--ref-update-interval": 2,
        "--kl-loss-coef": 0.1,
        "--kl-loss-type": "k3",
        "--opd-type": "megatron",
        "--opd-teacher-load": build_tiny_qwen3(folder / "teacher", seed=9, init_std=0.08),
        "--log-probs-max-tokens-per-gpu": 2048,
    }
    job = Job(folder, num_rollout=4, flags=flags, switches=("--use-kl-loss", "--use-opd"))
    job.prepare()
    return job


@pytest.fixture(scope="module")
def output(job: Job) -> str:
    running = job.start()
    try:
        said, _ = running.communicate(timeout=500)
    finally:
        running.kill()
    assert running.returncode == 0, said
    return said


@pytest.mark.usefixtures("output")
def test_engines_and_actor_start_at_the_reference_and_the_kl_returns_to_zero_when_it_follows(job: Job) -> None:
    steps = [step["train"] for step in job.steps()]
    assert steps[0]["train_rollout_logprob_abs_diff"] < 1e-3, "the engines sample what the reference gave"
    kl = [step["kl_loss"] for step in steps]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[1] > 1e-5
    assert kl[2] == pytest.approx(0.0, abs=1e-6)
    assert kl[3] > 1e-5
    assert all(step["opd_reverse_kl"] > 0.1 for step in steps), "the teacher is another model"


@pytest.mark.usefixtures("output")
def test_a_commit_has_the_reference_that_followed(job: Job) -> None:
    assert committed_rollouts(job.run) == [0, 1, 2, 3]
    folders = [Path(job.run / f"iter_{number:07d}" / "reference") for number in range(4)]
    assert [folder.is_dir() for folder in folders] == [False, True, True, True]
