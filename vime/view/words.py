"""A run in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.progress import StepRecord, bottleneck_of
from vime.counted import counted
from vime.view.metrics import RunMetrics
from vime.view.panels import shown


def bottleneck_words(steps: Sequence[StepRecord]) -> str:
    """Which side is the slower one."""
    if not steps:
        return "No batch was trained yet."
    return bottleneck_of(steps[-1])


def summary(metrics: RunMetrics, *, is_running: bool) -> list[str]:
    """What happened so far, a sentence each."""
    steps = metrics.steps
    if not steps:
        return ["No batch was trained yet." if is_running else "The run has trained nothing."]
    first, last = steps[0], steps[-1]
    state = "runs" if is_running else "is not running"
    sentences = [
        f"The run {state}: {last.rollout_id + 1} of {counted(last.num_rollout, 'rollout batch')} trained, policy "
        f"version {last.policy_version} at the last plan.",
        f"Reward went from {shown(first.reward_mean)} to {shown(last.reward_mean)}"
        f" (best {shown(max(step.reward_mean for step in steps))}), response length from "
        f"{shown(first.response_tokens_mean)} to {shown(last.response_tokens_mean)} tokens.",
        f"Of {counted(last.generated, 'generated group')} {last.trained} are trained, {last.pending} pending, "
        f"{last.in_flight} in flight and {sum(last.dropped.values())} dropped{_reasons(last)}.",
        f"A batch took {_median([step.step_s for step in steps]):.2f} s in the median: "
        f"{_median([step.wait_s for step in steps]):.2f} s waiting, {_median([step.train_s for step in steps]):.2f} s "
        f"training, {_median([step.publish_s for step in steps]):.2f} s committing and publishing.",
    ]
    if metrics.num_rolled_back:
        sentences.append(f"{counted(metrics.num_rolled_back, 'batch')} rolled back by resumes and trained anew.")
    if metrics.evaluations:
        newest = metrics.evaluations[-1]
        scores = ", ".join(f"{name} {shown(value)}" for name, value in list(newest.metrics.items())[:4])
        sentences.append(f"Evaluation after {counted(newest.rollouts_before, 'batch')}: {scores or newest.problem}.")
    return sentences


def _reasons(step: StepRecord) -> str:
    words = ", ".join(f"{count} {reason}" for reason, count in sorted(step.dropped.items()))
    return f" ({words})" if words else ""


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
