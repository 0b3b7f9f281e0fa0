"""The `evaluation` example for two rollouts, and an evaluation of what it has trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.evaluation.records import EvaluationRecord, read_evaluations
from tests.examples.run_script import said_by

ROOT = Path(__file__).resolve().parents[2]


def run_example(folder: Path, *words: str) -> str:
    """What the example printed."""
    return said_by(folder, "evaluation", "--rollout-batch-size", "8", *words)


def evaluations(folder: Path) -> list[EvaluationRecord]:
    return read_evaluations((folder / "run" / "metrics.jsonl").read_bytes())


def answers(folder: Path, step: int, data_set: str) -> list[dict[str, Any]]:
    lines = (folder / "run" / "evaluations" / f"{step}.jsonl").read_text().splitlines()
    return [answer for answer in map(json.loads, lines) if answer["data_set"] == data_set]


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.multiproc
@pytest.mark.timeout(900)
def test_evaluation_during_training_and_afterwards_of_the_same_weights_agree(tmp_path: Path) -> None:
    said = run_example(tmp_path, "--num-rollout", "2", "--eval-interval", "1")
    before, between, after = evaluations(tmp_path)
    assert [record.evaluation for record in (before, between, after)] == [0, 1, 2]
    assert [record.policy_version for record in (before, between, after)] == [1, 2, 3]
    for record in (before, between, after):
        assert [(each.prompts, each.answers, each.failed) for each in record.data_sets] == [(64, 512, {}), (64, 64, {})]
        rates = [record.metrics[f"eval/sampled-pass@{k}"] for k in (1, 2, 4, 8)]
        assert rates[0] == pytest.approx(record.metrics["eval/sampled"])
        assert rates[0] > 0.1
        assert sorted(set(rates)) == rates
    assert "Evaluation before training (policy version 1)" in said
    assert "sampled: 64 prompts, reward 0." in said
    assert "Nothing to do: already at 2 of 2" in run_example(tmp_path, "--num-rollout", "2", "--eval-interval", "1")

    trained = answers(tmp_path, 2, "greedy")
    said = run_example(tmp_path, "--num-rollout", "0")
    assert "nothing is trained" in said
    assert [record.evaluation for record in evaluations(tmp_path)] == [0, 1, 2, 2]
    again = answers(tmp_path, 2, "greedy")
    assert [answer["response"] for answer in again] == [answer["response"] for answer in trained]
    assert {version for answer in again for version in answer["policy_versions"]} == {4}
