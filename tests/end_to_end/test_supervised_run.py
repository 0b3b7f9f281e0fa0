"""Supervised fine-tuning by `vime train`: queue, trainer and commits, and no engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recovery.audit import audit_run
from recovery.commit import committed_rollouts
from tests.end_to_end.changed_line import changed_line
from tests.end_to_end.standin_jobs import vime
from tests.support.tiny_models import build_tiny_qwen3

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Its run folder, and the job."""
    folder = tmp_path_factory.mktemp("job")
    build_tiny_qwen3(folder / "model", seed=0)
    rows = [json.dumps({"input": f"q{number:03d}=", "label": "yes"}) for number in range(64)]
    (folder / "records.jsonl").write_text("\n".join(rows) + "\n")
    flags = {
        "--hf-checkpoint": folder / "model",
        "--prompt-data": folder / "records.jsonl",
        "--label-key": "label",
        "--num-rollout": 6,
        "--rollout-batch-size": 16,
        "--num-steps-per-rollout": 4,
        "--loss-type": "sft_loss",
        "--lr": 3e-3,
        "--max-tokens-per-gpu": 512,
        "--actor-num-gpus-per-node": 1,
        "--rollout-data-transport": "straw",
        "--save": folder / "run",
        "--save-interval": 6,
    }
    words = [str(word) for pair in flags.items() for word in pair]
    switches = ["--use-dynamic-batch-size", "--calculate-per-token-loss", "--disable-compute-advantages-and-returns"]
    job = subprocess.run(
        [sys.executable, "-m", "vime", "train", *words, *switches],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    return folder / "run", job


Finished = tuple[Path, subprocess.CompletedProcess[str]]


def test_records_are_learned_without_an_engine(finished: Finished) -> None:
    run, job = finished
    assert job.returncode == 0, job.stdout + job.stderr
    steps = [json.loads(line)["train"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["loss"] < steps[0]["loss"] / 2
    assert steps[0]["num_tokens"] == 4 * 4, "three characters and the end"
    assert not {"pg_loss", "ppo_kl", "ois"} & steps[0].keys()
    assert not list((run / "logs").glob("engine*"))
    assert "published" not in job.stdout


def test_every_record_is_accounted_for(finished: Finished) -> None:
    run, _ = finished
    report = audit_run(run)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], 6 * 16)
    assert report.identity_holds
    assert committed_rollouts(run) == [5]


def test_replay_of_a_stored_rollout_is_bitwise_equal(finished: Finished) -> None:
    run, _ = finished
    done = vime("replay", run, "--rollout", 1, "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("bitwise equal (")


def test_replay_after_one_changed_line_of_the_loss_says_where_it_differs_first(
    finished: Finished, tmp_path: Path
) -> None:
    run, _ = finished
    old, new = "return -log_probs", "return -log_probs * 1.001"
    path = changed_line(tmp_path / "changed", "vime.algorithms.policy_loss", old, new)
    done = vime("replay", run, "--rollout", 0, "--check", path=path)
    assert done.returncode == 6, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("not bitwise equal: differs first at rollout 0, step 0, loss of sample "), last
