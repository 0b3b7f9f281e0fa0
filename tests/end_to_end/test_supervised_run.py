"""Supervised fine-tuning by `vime train`: queue, trainer and commits, and no engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recovery.audit import audit_run
from recovery.commit import committed_rollouts
from tests.end_to_end.jobs import REPOSITORY
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
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
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
