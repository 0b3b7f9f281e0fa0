"""Where every group is, read off straw's own state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import straw

from storage.queue_types import QueueFacts
from vime.data.cursor import PromptCursor

TASK_PREFIX = "prompt:"
PROMPT_PRODUCER = "prompts"
"""The name under which straw keeps the prompt cursor."""


def group_of(task_id: str) -> int:
    """Group index of a straw task id."""
    return int(task_id.removeprefix(TASK_PREFIX))


def committed_cursor(coordinator: straw.Coordinator) -> PromptCursor | None:
    """The cursor of the newest submission to a segment, None before the first."""
    state = coordinator.producer_state(PROMPT_PRODUCER)
    return None if state is None else msgspec.convert(state, PromptCursor)


def sort_out(tasks: Mapping[str, Any], positions: Iterable[tuple[str, int]], facts: QueueFacts) -> None:
    """Add a segment's groups to `facts`, from straw's task table and (task id, position) of the accepted ones."""
    position_of = dict(positions)
    for task_id, task in sorted(tasks.items(), key=lambda item: group_of(item[0])):
        index = group_of(task_id)
        if task["state"] == "completed":
            facts.accepted[index] = position_of[task_id]
        elif task["state"] == "failed":
            facts.dropped[index] = drop_reason(task)
        elif task["generation"] == 0:
            facts.fresh.append(index)
        else:
            facts.in_flight.append(index)


def drop_reason(task: Mapping[str, Any]) -> str:
    """Why a failed task was dropped."""
    return str(task["failure"].get("reason") or task["failure"].get("category", "unknown"))
