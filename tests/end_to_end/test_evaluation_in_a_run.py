"""Evaluations of whole runs: trainer, queue, producers and Ray are real, engines are stand-ins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.evaluation.records import EvaluationRecord, read_evaluations
from tests.end_to_end.jobs import Job, run_with_standins

pytestmark = [pytest.mark.slow, pytest.mark.multiproc, pytest.mark.timeout(600)]


def evaluations(job: Job) -> list[EvaluationRecord]:
    return read_evaluations((job.run / "metrics.jsonl").read_bytes())


def test_evaluations_have_one_version_each_and_only_a_missing_one_is_made_by_a_resume(tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"input": f"r{n}=", "label": str(n)}) + "\n" for n in range(24)))
    flags = {
        "--parity-probes": 0,  # no trainer agrees with a stand-in
        "--eval-prompt-data": held_out,
        "--eval-interval": 2,
        "--n-samples-per-eval-prompt": 2,
    }
    job = Job(tmp_path, num_rollout=3, flags=flags)
    job.prepare()
    output = run_with_standins(job)
    assert "Evaluation before training (policy version 1)" in output
    before, between, after = evaluations(job)
    assert [record.evaluation for record in (before, between, after)] == [0, 2, 3]
    assert [record.policy_versions for record in (before, between, after)] == [[1], [3], [4]]
    assert before.data_sets[0].answers == 48
    assert [step["rollout_id"] for step in job.steps()] == [0, 1, 2]

    kept = [record for record in evaluations(job) if record.evaluation != 3]
    lines = (job.run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (job.run / "metrics.jsonl").write_bytes(b"".join(line for line in lines if b'"evaluation":3' not in line))
    assert evaluations(job) == kept
    output = run_with_standins(job)
    assert "The evaluation after step 3 is missing and is made now." in output
    assert "Evaluation after step 3 (policy version 5)" in output, (
        "the number of the one that is missing is not used again"
    )
    assert [record.evaluation for record in evaluations(job)] == [0, 2, 3]
    assert "Nothing to do: already at 3 of 3." in run_with_standins(job)
    assert len(evaluations(job)) == 3
