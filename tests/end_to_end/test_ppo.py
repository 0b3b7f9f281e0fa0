"""A run of ppo with the real engine: the critic is warmed up, trained, committed and resumed with the actor."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from recovery.commit import commit_path, read_commit
from tests.end_to_end.jobs import Job

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(900)]

ROLES = """\
megatron:
- {name: default, role: actor, overrides: {lr: 1e-3}}
- {name: default, role: critic, overrides: {lr: 2e-3, lr_warmup_iters: 2, save: SAVE}}
"""


@dataclass
class Finished:
    """Two sessions of one run."""

    job: Job
    first: str
    second: str


def run(job: Job) -> str:
    running = job.start()
    try:
        output, _ = running.communicate(timeout=400)
    except subprocess.TimeoutExpired:
        running.kill()
        raise
    assert running.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder: Path = tmp_path_factory.mktemp("ppo")
    (folder / "roles.yaml").write_text(ROLES.replace("SAVE", str(folder / "critics")))
    flags = {
        "--advantage-estimator": "ppo",
        "--lambd": 0.95,
        "--num-critic-only-steps": 1,
        "--megatron-config-path": folder / "roles.yaml",
        "--train-env-vars": '{"VIME_TEST_VALUE": 3}',
    }
    job = Job(folder, num_rollout=2, flags=flags, switches=("--offload-train",))
    job.prepare()
    first = run(job)
    second = run(Job(folder, num_rollout=3, flags=flags, switches=job.switches))
    return Finished(job, first, second)


def test_the_first_batch_trains_the_critic_alone_and_later_ones_both(finished: Finished) -> None:
    warm, *later = [step["train"] for step in finished.job.steps()]
    assert "loss" not in warm
    assert warm["value_loss"] > 0
    assert all({"loss", "value_loss", "value_clipfrac", "value_explained_variance"} <= step.keys() for step in later)
    assert [step["rollout_id"] for step in finished.job.steps()] == [0, 1, 2]


def test_roles_have_their_own_learning_rates_and_a_resume_continues_the_critics_warmup(finished: Finished) -> None:
    steps = [step["train"] for step in finished.job.steps()]
    assert [step["critic_lr"] for step in steps] == pytest.approx([0.0, 1e-3, 2e-3])
    assert [step["lr"] for step in steps[1:]] == [1e-3, 1e-3]


def test_a_commit_holds_the_critic_by_digest_and_its_copy_is_where_its_save_says(finished: Finished) -> None:
    record = read_commit(commit_path(finished.job.run, 2))
    assert any(name.startswith("iter_0000002/critic/") and name.endswith(".distcp") for name in record.files)
    copies = finished.job.folder / "critics"
    assert (copies / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert (copies / "iter_0000002" / "metadata.json").is_file()
