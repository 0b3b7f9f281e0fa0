"""A run in memory whose batches are the user's own choice and making, checked, traced and recorded as it goes."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import memray
import pytest

from recovery.audit import audit_run
from tests.end_to_end import own_hooks
from tests.end_to_end.jobs import Job, run_with_standins

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300), pytest.mark.slow]
BATCH, MEMBERS = 8, 4


def test_batches_are_chosen_made_checked_and_recorded_as_the_flags_say(tmp_path: Path) -> None:
    norms, memory = tmp_path / "norms.jsonl", tmp_path / "memory"
    job = Job(
        tmp_path,
        num_rollout=3,
        flags={
            "--parity-probes": 0,
            "--rollout-data-transport": "object-store",
            "--rollout-io-concurrency": 1,
            "--buffer-filter-path": f"{own_hooks.__name__}.newest",
            "--custom-convert-samples-to-train-data-path": f"{own_hooks.__name__}.cut_short",
            "--model-name": "Qwen3ForCausalLM",
            "--ci-train-rollout-logprob-abs-diff-threshold": 100,
            "--ci-save-grad-norm": norms,
            "--memory-recorder": "memray",
            "--memory-snapshot-num-steps": 1,
            "--memory-snapshot-dir": memory,
            "--profile-step-start": 1,
            "--profile-step-end": 2,
        },
        switches=("--ci-test", "--no-save-optim", "--use-pytorch-profiler", "--use-distributed-post"),
    )
    job.prepare()
    run_with_standins(job)

    steps = job.steps()
    assert [step["reward_mean"] for step in steps] == [7.0] * 3
    assert [step["response_tokens_mean"] for step in steps] == [2.0] * 3
    assert [step["train"]["num_tokens"] for step in steps] == [2 * BATCH * MEMBERS] * 3
    buffers = [json.loads(line) for line in (job.run / "buffers.jsonl").read_text().splitlines()]
    assert [rollout_id for rollout_id, _ in buffers] == [0, 1, 2]
    assert all(size >= BATCH for _, size in buffers)
    report = audit_run(job.run)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], 3 * BATCH)

    saved = [json.loads(line) for line in norms.read_text().splitlines()]
    assert [(line["role"], line["rollout_id"], line["step_id"]) for line in saved] == [
        ("actor", n, 0) for n in range(3)
    ]
    assert [line["grad_norm"] for line in saved] == [step["train"]["grad_norm"] for step in steps]
    (trace,) = (job.run / "profiles").iterdir()
    assert trace.name == "rollout_1_rank_0.json.gz"
    with gzip.open(trace) as file:
        assert any(event.get("name") == "aten::mm" for event in json.load(file)["traceEvents"])
    (recorded,) = memory.iterdir()
    with memray.FileReader(recorded) as reader:
        assert reader.metadata.total_allocations > 0
        assert reader.metadata.end_time.timestamp() < time.time()
    assert not list(job.run.glob("iter_*/*optim*"))
