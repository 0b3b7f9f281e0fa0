"""Where every group is, read off straw's own state.

A group is one task of straw. It is submitted with its prompt's reference in the metadata. Accepting its result returns
the task to straw with the result as its input and a position in the metadata, because straw can return many tasks in
one transaction, and can complete only one. An accepted task has a priority below all others and is never leased again.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import straw

from storage.queue_types import QueueFacts, Stage
from storage.refs import PoolRef, from_straw_ref
from vime.data.cursor import PromptCursor
from vime.errors import CorruptDataError

TASK_PREFIX = "prompt:"
PROMPT_PRODUCER = "prompts"
"""The name under which straw keeps the prompt cursor."""
ACCEPTED_PRIORITY = -1


class TaskNotes(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The metadata of a group's task."""

    digest: str
    """Of the prompt."""
    prompt: PoolRef | None = None
    """Where the prompt lies."""
    version: int | None = None
    """Oldest policy version of a returned group's tokens."""
    order: int = 0
    """Counts returns over all segments, so that the first returned is the first leased."""
    attempt: str = ""
    """The attempt that returned the group last, or whose result was accepted."""
    position: int | None = None
    """Order of acceptance in the segment, from 0; None before."""
    requeued_from: int | None = None
    """The dropped group whose prompt this one takes up again."""


class GroupPhase(enum.Enum):
    FRESH = "fresh"
    WAITING = "waiting"
    """Leased before, and waiting again."""
    LEASED = "leased"
    ACCEPTED = "accepted"
    DROPPED = "dropped"


class GroupState(msgspec.Struct, frozen=True, gc=False):
    """One group of a segment."""

    group_index: int
    phase: GroupPhase
    stage: Stage
    ref: PoolRef
    """Its result when it is accepted; before, what the next attempt starts from."""
    notes: TaskNotes
    attempt: str = ""
    """The attempt that holds it, when it is leased."""
    reason: str = ""
    """Why it was dropped, when it was."""


def group_of(task_id: str) -> int:
    """Group index of a straw task id."""
    return int(task_id.removeprefix(TASK_PREFIX))


def task_of(group_index: int) -> str:
    """Straw task id of a group."""
    return f"{TASK_PREFIX}{group_index}"


def committed_cursor(coordinator: straw.Coordinator) -> PromptCursor | None:
    """The cursor of the newest submission to a segment, None before the first."""
    state = coordinator.producer_state(PROMPT_PRODUCER)
    return None if state is None else msgspec.convert(state, PromptCursor)


def group_states(tasks: Mapping[str, Any]) -> Iterator[GroupState]:
    """Every group in straw's task table, by index."""
    for task_id in sorted(tasks, key=group_of):
        yield group_state(tasks[task_id])


def group_state(task: Mapping[str, Any]) -> GroupState:
    """One entry of straw's task table."""
    spec = task["spec"]
    notes = msgspec.convert(spec["metadata"], TaskNotes)
    given = spec["input_ref"]
    ref = notes.prompt if given is None else from_straw_ref(straw.RecordSetRef.from_dict(given))
    if ref is None:
        raise CorruptDataError(f"{spec['task_id']}: its entry in the queue names neither a prompt nor an input.")
    return GroupState(
        group_of(spec["task_id"]),
        _phase(task, notes),
        Stage(max(spec["priority"], 0)),
        ref,
        notes,
        attempt=task["lease"]["attempt_id"] if task["lease"] is not None else "",
        reason=drop_reason(task) if task["state"] == "failed" else "",
    )


def _phase(task: Mapping[str, Any], notes: TaskNotes) -> GroupPhase:
    if task["state"] == "failed":
        return GroupPhase.DROPPED
    if notes.position is not None:
        return GroupPhase.ACCEPTED
    if task["state"] == "leased":
        return GroupPhase.LEASED
    return GroupPhase.FRESH if task["generation"] == 0 else GroupPhase.WAITING


def sort_out(states: Iterable[GroupState], first_position: int, facts: QueueFacts) -> None:
    """Add a segment's groups to `facts`."""
    for state in states:
        match state.phase:
            case GroupPhase.ACCEPTED:
                facts.accepted[state.group_index] = first_position + (state.notes.position or 0)
            case GroupPhase.DROPPED:
                facts.dropped[state.group_index] = state.reason
            case GroupPhase.FRESH:
                facts.fresh.append(state.group_index)
            case GroupPhase.WAITING | GroupPhase.LEASED:
                facts.in_flight.append(state.group_index)


def drop_reason(task: Mapping[str, Any]) -> str:
    """Why a failed task was dropped."""
    return str(task["failure"].get("reason") or task["failure"].get("category", "unknown"))
