"""Report functions of a user's own."""

from __future__ import annotations

from typing import Any

CALLS: list[tuple[Any, ...]] = []


def report(rollout_id: int, args: Any, samples: list[Any], extra_metrics: dict[str, Any], time: float) -> bool:
    CALLS.append((rollout_id, args, samples, extra_metrics, time))
    return True


def report_beside(rollout_id: int, args: Any, samples: list[Any], extra_metrics: dict[str, Any], time: float) -> None:
    """None leaves vime's own report."""


def report_badly(rollout_id: int, args: Any, samples: list[Any], extra_metrics: dict[str, Any], time: float) -> bool:  # noqa: ARG001
    raise KeyError("board")
