"""Whole jobs without an engine: records are trained as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.end_to_end.jobs import REPOSITORY
from tests.support.tiny_models import build_tiny_qwen3


def prepare(folder: Path, num_records: int = 64) -> None:
    """Model with random weights, and records."""
    build_tiny_qwen3(folder / "model", seed=0)
    rows = [json.dumps({"input": f"q{number:03d}=", "label": f"yes{number % 7}"}) for number in range(num_records)]
    (folder / "records.jsonl").write_text("\n".join(rows) + "\n")


def flags(folder: Path, run: Path, **changed: Any) -> list[str]:
    """Words after `vime train`; `changed` flags replace the usual ones, None leaves one out, True is a switch."""
    values: dict[str, Any] = {
        "hf_checkpoint": folder / "model",
        "prompt_data": folder / "records.jsonl",
        "label_key": "label",
        "num_rollout": 4,
        "rollout_batch_size": 8,
        "num_steps_per_rollout": 2,
        "loss_type": "sft_loss",
        "lr": 3e-3,
        "max_tokens_per_gpu": 512,
        "actor_num_gpus_per_node": 1,
        "trainer_num_threads": 1,
        "rollout_data_transport": "straw",
        "save": run,
        "save_interval": 2,
        "use_dynamic_batch_size": True,
        "calculate_per_token_loss": True,
        "disable_compute_advantages_and_returns": True,
    } | changed
    words = []
    for name, value in values.items():
        if value is not None:
            words += ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])]
    return words


def vime(*words: str, path: Path = REPOSITORY, timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
    """Run a command of vime; `path` comes first among the places that modules are imported from."""
    return subprocess.run(
        [sys.executable, "-m", "vime", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys([str(path), str(REPOSITORY)]))},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd=REPOSITORY,
    )


def train(folder: Path, run: Path, **changed: Any) -> str:
    """Run a job to its end; its output."""
    done = vime("train", *flags(folder, run, **changed))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def steps(run: Path) -> list[dict[str, Any]]:
    """The records of a run's rollout batches."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
