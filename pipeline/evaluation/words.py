"""An evaluation in words, for the progress view."""

from __future__ import annotations

from pipeline.evaluation.records import DataSetResult, EvaluationRecord
from vime.counted import agreeing, counted


def evaluation_words(record: EvaluationRecord) -> list[str]:
    """A line for the evaluation, then one for each data set."""
    when = f"after step {record.evaluation}" if record.evaluation else "before training"
    if record.problem:
        return [f"Evaluation {when} gave no result: {record.problem}"]
    lines = [f"Evaluation {when} ({_policy(record)}), {record.seconds:.1f} s; answers in {record.answers_file}:"]
    return lines + [f"  {_data_set(result, record.metrics)}" for result in record.data_sets]


def _policy(record: EvaluationRecord) -> str:
    if record.policy_version is not None:
        return f"policy version {record.policy_version}"
    if len(record.policy_versions) > 1:
        return f"mixed: policy versions {', '.join(map(str, record.policy_versions))}"
    return "policy version unknown"


def _data_set(result: DataSetResult, metrics: dict[str, float]) -> str:
    key = f"eval/{result.name}"
    parts = [] if key not in metrics else [f"reward {metrics[key]:.3f}"]
    passed = {name.removeprefix(f"{key}-"): value for name, value in metrics.items() if name.startswith(f"{key}-pass@")}
    parts += [f"{name} {value:.3f}" for name, value in passed.items()]
    if key in metrics:
        parts.append(f"truncated {metrics[f'{key}-truncated_ratio']:.0%}")
    failed = sum(result.failed.values())
    if failed:
        reasons = ", ".join(f"{count} {reason}" for reason, count in result.failed.items())
        parts.append(f"{failed} of {result.answers} {agreeing(result.answers, 'answer')} failed ({reasons})")
    return f"{result.name}: {counted(result.prompts, 'prompt')}, {', '.join(parts)}"
