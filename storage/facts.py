"""Where every group is, read off straw's own state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from storage.queue_types import QueueFacts
from storage.submission import group_of
from vime.data.cursor import PromptCursor


def sort_out(tasks: Mapping[str, Any], positions: Mapping[str, int], cursor: PromptCursor) -> QueueFacts:
    """Facts from straw's task table and the positions of accepted task ids."""
    facts = QueueFacts([], [], {}, {}, cursor)
    for task_id, task in sorted(tasks.items(), key=lambda item: group_of(item[0])):
        index = group_of(task_id)
        if task["state"] == "completed":
            facts.accepted[index] = positions[task_id]
        elif task["state"] == "failed":
            facts.dropped[index] = task["failure"].get("reason") or task["failure"].get("category", "unknown")
        elif task["generation"] == 0:
            facts.fresh.append(index)
        else:
            facts.in_flight.append(index)
    return facts
