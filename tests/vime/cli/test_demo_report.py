"""The numbers that the demo ends with."""

from __future__ import annotations

from typing import Any

import pytest

from recovery.audit_parts import AuditReport
from vime.cli.demo_report import demo_summary


def record(time_s: float, branch: str, spanning: int) -> dict[str, Any]:
    return {
        "time_s": time_s,
        "branch": branch,
        "spanning_samples": spanning,
        "reward_mean": 0.5,
        "wait_s": 1.0,
        "step_s": 2.0,
        "staleness_mean": 1.0,
        "staleness_max": 2,
    }


@pytest.mark.parametrize(
    ("counts", "total"),
    [
        ([("a", 3), ("a", 5)], 5),
        ([("a", 3), ("b", 5), ("b", 6)], 6),  # the trainer went back to a commit within a session
        ([("a", 3), ("b", 5), ("c", 1), ("c", 2)], 7),  # then another session began
    ],
)
def test_samples_that_span_publications_are_counted_once_a_session(counts: list[tuple[str, int]], total: int) -> None:
    steps = {number: record(float(number), *count) for number, count in enumerate(counts)}
    report = AuditReport(1, 1, 0, 0, {}, 0, [], [])
    assert demo_summary(steps, report, kills=2, resumes=2, seconds=1.0).numbers["spanning_requests"] == total
