"""When too many groups were set aside for the run to go on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vime.errors import TooManyFailuresError

MIN_DROPPED_GROUPS = 8
"""Fewer say nothing about the whole: in a small run one bad prompt is a large fraction."""
_NAMED_REASONS = 3


def check_failed_fraction(dropped: Mapping[str, int], num_generated: int, *, allowed: float, run: Path) -> None:
    """Judge the groups that a session has set aside (reason -> groups) against all that it has worked on.

    Raises:
        TooManyFailuresError: there are at least `MIN_DROPPED_GROUPS`, and more than the fraction `allowed`; the
            message names the most frequent reasons and the command that lists the groups.
    """
    total = sum(dropped.values())
    if total < MIN_DROPPED_GROUPS or total <= allowed * num_generated:
        return
    frequent = sorted(dropped.items(), key=lambda item: (-item[1], item[0]))[:_NAMED_REASONS]
    raise TooManyFailuresError(
        f"{total} of {num_generated} groups were set aside, more than --rollout-max-failed-fraction {allowed} allows. "
        f"Most frequent reasons: {', '.join(f'{reason} ({count})' for reason, count in frequent)}.",
        next_step=f"`vime queue dead {run}` lists each with its message, trace and sample.",
    )
