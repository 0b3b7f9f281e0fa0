"""The numbers and the label of an evaluation."""

from __future__ import annotations

from typing import Any

from pipeline.evaluation.records import EvalAnswer, EvaluationRecord
from pipeline.evaluation.scores import data_set_metrics, data_set_result
from pipeline.evaluation.words import evaluation_words


def answer(prompt: int = 0, reward: float | None = 1.0, **changes: Any) -> EvalAnswer:
    whole: dict[str, Any] = {
        "data_set": "a", "prompt_number": prompt, "attempt": 0, "source": "", "prompt": "", "label": None,
        "response": "", "reward": reward, "status": "completed", "prompt_tokens": 1, "response_tokens": 4,
        "policy_versions": [3], "metadata": {}, "failure": "" if reward is not None else "reward_nan",
    }  # fmt: skip
    return EvalAnswer(**{**whole, **changes})


def record(answers: list[EvalAnswer], **changes: Any) -> EvaluationRecord:
    result = data_set_result("a", answers)
    whole: dict[str, Any] = {
        "evaluation": 5, "branch": "b", "time_s": 0.0, "generate_s": 1.0, "seconds": 2.0,
        "policy_version": result.policy_version, "policy_versions": result.policy_versions,
        "metrics": data_set_metrics("a", answers), "data_sets": [result], "answers_file": "evaluations/5.jsonl",
    }  # fmt: skip
    return EvaluationRecord(**{**whole, **changes})


def test_a_failed_answer_counts_as_failed_and_in_nothing_else() -> None:
    metrics = data_set_metrics("a", [answer(), answer(reward=0.0, response_tokens=8), answer(1, None)])
    assert (metrics["eval/a"], metrics["eval/a-pass@1"], metrics["eval/a-pass@2"]) == (0.5, 0.5, 1.0)
    assert metrics["eval/a-failed_ratio"] == 1 / 3
    assert metrics["eval/a/response_len/mean"] == 6.0


def test_a_data_set_without_a_scored_answer_has_no_reward() -> None:
    assert data_set_metrics("a", [answer(0, None)]) == {"eval/a-failed_ratio": 1.0}


def test_a_result_is_labelled_with_a_version_only_when_it_made_every_answer() -> None:
    assert data_set_result("a", [answer(), answer()]).policy_version == 3
    assert data_set_result("a", [answer(), answer(policy_versions=[4])]).policy_version is None
    assert data_set_result("a", [answer(policy_versions=[3, 4])]).policy_versions == [3, 4]
    assert data_set_result("a", [answer(), answer(policy_versions=[])]).policy_version is None
    assert data_set_result("a", [answer(), answer(1, None, policy_versions=[9])]).policy_version == 3


def test_the_words_name_policy_scores_and_failures() -> None:
    first, second = evaluation_words(record([answer(), answer(1, 0.0), answer(1, None)]))
    assert first == "Evaluation after step 5 (policy version 3), 2.0 s; answers in evaluations/5.jsonl:"
    assert second == (
        "  a: 2 prompts, reward 0.500, pass@1 0.500, truncated 0%, 1 of 3 answers failed (1 reward_nan)"
    )  # fmt: skip
    mixed = evaluation_words(record([answer(), answer(policy_versions=[4])], evaluation=0))[0]
    assert mixed.startswith("Evaluation before training (mixed: policy versions 3, 4)")
    assert evaluation_words(record([], problem="it raised")) == ["Evaluation after step 5 gave no result: it raised"]
