"""What the demo shows at its end: numbers, words and a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recovery.audit_parts import AuditReport

EDGE_STEPS = 5
"""Steps averaged at either end."""


@dataclass(frozen=True)
class Summary:
    numbers: dict[str, Any]
    words: str
    sound: bool
    """Nothing was lost or trained twice, and the identity holds."""


def read_steps(run: Path) -> dict[int, dict[str, Any]]:
    """Rollout -> its newest record in `metrics.jsonl` (a resume trains some rollouts anew)."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return {}
    steps = {}
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue  # empty, or torn by a kill
        if "evaluation" not in record:
            steps[int(record["rollout_id"])] = record
    return dict(sorted(steps.items()))


def demo_summary(
    steps: Mapping[int, Mapping[str, Any]], report: AuditReport, *, kills: int, resumes: int, seconds: float
) -> Summary:
    """Numbers of the last line and the paragraph above it."""
    records = list(steps.values())
    rewards = [record["reward_mean"] for record in records]
    numbers: dict[str, Any] = {
        "reward_first": _mean(rewards[:EDGE_STEPS]),
        "reward_last": _mean(rewards[-EDGE_STEPS:]),
        "steps": len(records),
        "kills": kills,
        "resumes": resumes,
        "spanning_requests": _spanning(records),
        "generated": report.generated,
        "trained": report.trained,
        "pending": report.pending,
        "in_flight": report.in_flight,
        "dropped": sum(report.dropped.values()),
        "lost": len(report.lost),
        "trained_twice": len(report.trained_twice),
        "rolled_back": report.rolled_back,
        "trainer_idle_share": _mean([record["wait_s"] for record in records])
        / max(_mean([record["step_s"] for record in records]), 1e-9),
        "staleness_mean": _mean([record["staleness_mean"] for record in records]),
        "staleness_max": max(record["staleness_max"] for record in records),
        "unit": "groups",
        "seconds": round(seconds, 1),
    }
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in numbers.items()}
    sound = report.identity_holds and not report.lost and not report.trained_twice
    return Summary(rounded, _words(rounded, report), sound)


def _spanning(records: Sequence[Mapping[str, Any]]) -> int:
    """Of all sessions; each counts from 0, and one may have several branches."""
    total = newest = 0
    for record in sorted(records, key=lambda record: record["time_s"]):
        if record["spanning_samples"] < newest:
            total += newest
        newest = record["spanning_samples"]
    return total + newest


def draw_curves(steps: Mapping[int, Mapping[str, Any]], kills: Sequence[int], path: Path) -> None:
    """Reward and staleness over steps as a PNG; dashed lines mark the kills."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 6))
    numbers = [number + 1 for number in steps]
    top.plot(numbers, [record["reward_mean"] for record in steps.values()])
    top.set_ylabel("reward (exact match)")
    top.set_ylim(0, 1)
    bottom.plot(numbers, [record["staleness_mean"] for record in steps.values()], label="mean")
    bottom.plot(numbers, [record["staleness_max"] for record in steps.values()], label="max")
    bottom.set_ylabel("staleness (policy versions)")
    bottom.set_xlabel("step")
    bottom.legend()
    for axes in (top, bottom):
        for kill in kills:
            axes.axvline(kill, linestyle="--", color="grey")
    figure.suptitle("Reversing strings; dashed lines: kill -9 and resume")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _words(numbers: Mapping[str, Any], report: AuditReport) -> str:
    verdict = "no group was lost and none was trained twice" if not (report.lost or report.trained_twice) else "UNSOUND"
    lines = [
        f"\nThe reward went from {numbers['reward_first']:.2f} to {numbers['reward_last']:.2f} "
        f"in {numbers['steps']} steps.",
        f"The job was killed {numbers['kills']} times and resumed {numbers['resumes']} times: {verdict}.",
        f"{numbers['rolled_back']} groups were trained after a commit, taken back by a resume, and trained anew.",
        f"{numbers['spanning_requests']} requests were in flight while weights changed and have "
        "tokens of two policies.",
        f"The trainer waited {numbers['trainer_idle_share']:.0%} of the time; samples were "
        f"{numbers['staleness_mean']:.1f} versions old on average, {numbers['staleness_max']} at most.",
    ]
    problems = [*report.lost, *report.trained_twice]
    return "\n".join([*lines, *(f"PROBLEM: {problem}" for problem in problems[:20])])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)
