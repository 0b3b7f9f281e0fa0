"""The numbers of an evaluation, from its answers. Pure but for the clock."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from pipeline.evaluation.records import DataSetResult, EvalAnswer, EvaluationRecord
from vime.algorithms.pass_rate import pass_rates
from vime.utils.types import Sample

TRUNCATED = Sample.Status.TRUNCATED.value


def evaluation_record(
    answers: Mapping[str, Sequence[EvalAnswer]],
    *,
    evaluation: int,
    branch: str,
    generate_s: float,
    seconds: float,
    answers_file: str,
    more_metrics: Mapping[str, float] | None = None,
    problem: str = "",
) -> EvaluationRecord:
    """The record of an evaluation, from the answers of each data set; `more_metrics` go before those made of them."""
    metrics: dict[str, float] = {}
    for name, of_set in answers.items():
        metrics |= data_set_metrics(name, of_set)
    scored = [answer for of_set in answers.values() for answer in of_set if answer.reward is not None]
    versions = versions_of(scored)
    return EvaluationRecord(
        evaluation=evaluation,
        branch=branch,
        time_s=time.time(),
        generate_s=generate_s,
        seconds=seconds,
        policy_version=one_version(versions, scored),
        policy_versions=versions,
        metrics=metrics | dict(more_metrics or {}),
        data_sets=[data_set_result(name, of_set) for name, of_set in answers.items()],
        answers_file=answers_file,
        problem=problem,
    )


def data_set_result(name: str, answers: Sequence[EvalAnswer]) -> DataSetResult:
    """What a data set consisted of, how much of it failed, and which policies answered."""
    scored = [answer for answer in answers if answer.reward is not None]
    versions = versions_of(scored)
    return DataSetResult(
        name,
        prompts=len({answer.prompt_number for answer in answers}),
        answers=len(answers),
        failed=dict(sorted(Counter(answer.failure for answer in answers if answer.reward is None).items())),
        policy_version=one_version(versions, scored),
        policy_versions=versions,
    )


def versions_of(answers: Iterable[EvalAnswer]) -> list[int]:
    """Policy versions that made tokens of these answers, ascending."""
    return sorted({version for answer in answers for version in answer.policy_versions})


def one_version(versions: Sequence[int], answers: Iterable[EvalAnswer]) -> int | None:
    """The version that made every answer; None when there are several, or one answer doesn't know its own."""
    return versions[0] if len(versions) == 1 and all(answer.policy_versions for answer in answers) else None


def data_set_metrics(name: str, answers: Sequence[EvalAnswer]) -> dict[str, float]:
    """Mean reward, pass@k, truncation and lengths over the answers that were scored; the share that failed over all."""
    metrics: dict[str, float] = {}
    if answers:
        metrics[f"eval/{name}-failed_ratio"] = float(np.mean([answer.reward is None for answer in answers]))
    scored = [answer for answer in answers if answer.reward is not None]
    if not scored:
        return metrics
    lengths = [answer.response_tokens for answer in scored]
    rewards: dict[int, list[float]] = {answer.prompt_number: [] for answer in scored}
    for answer in scored:
        rewards[answer.prompt_number].append(answer.reward or 0.0)
    metrics[f"eval/{name}"] = float(np.mean([reward for group in rewards.values() for reward in group]))
    metrics |= {f"eval/{name}-pass@{k}": rate for k, rate in pass_rates(list(rewards.values())).items()}
    metrics[f"eval/{name}-truncated_ratio"] = float(np.mean([answer.status == TRUNCATED for answer in scored]))
    return metrics | {
        f"eval/{name}/response_len/mean": float(np.mean(lengths)),
        f"eval/{name}/response_len/median": float(np.median(lengths)),
        f"eval/{name}/response_len/max": float(max(lengths)),
        f"eval/{name}/response_len/min": float(min(lengths)),
    }
