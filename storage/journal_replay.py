"""What a segment's journal adds up to, read without a coordinator: nothing is locked or written.

The table of tasks has the form of `straw.Coordinator.tasks`, so that what reads the one reads the other.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from straw.backend import FilesystemBackend
from straw.errors import QueueError
from straw.journal import Journal

from vime.errors import CorruptDataError, StorageError, reason_of

Event = dict[str, Any]


class TaskEvent(msgspec.Struct, frozen=True):
    """One thing that happened to a task, in order."""

    what: str
    """submitted, leased, returned, expired, revoked (its coordinator ended), retried, accepted, dropped, cancelled."""
    attempt: int
    """Number of the lease that it happened under; 0 before the first."""
    worker: str | None = None
    """Of a lease: who got it."""


@dataclass
class Replay:
    """A segment's state at the end of what was read."""

    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By task id: `spec`, `state`, `generation` (leases so far), `lease` (the newest) and `failure`."""
    history: dict[str, list[TaskEvent]] = field(default_factory=lambda: defaultdict(list))
    producer_state: dict[str, Any] | None = None
    """What came with the newest submission: the prompt cursor."""
    num_transactions: int = 0
    journal_bytes: int = 0


class _Identity(msgspec.Struct):
    """What straw writes beside a journal, as far as it is needed."""

    queue_id: str


def segment_folders(root: Path) -> dict[str, Path]:
    """Queue id -> folder of each straw queue of a pool, without those that are reclaimed meanwhile.

    Raises `CorruptDataError` for one that doesn't say its id.
    """
    folders = {}
    for path in (root / "queues").glob("*/run.json"):
        try:
            folders[msgspec.json.decode(path.read_bytes(), type=_Identity).queue_id] = path.parent
        except FileNotFoundError:
            continue
        except (OSError, msgspec.MsgspecError) as error:
            raise CorruptDataError(
                f"{path} can't be read: {reason_of(error)}.", next_step="Restore it from a copy."
            ) from error
    return folders


def read_journal(folder: Path) -> Replay:
    """Replay a straw queue's journal, which may grow meanwhile: a transaction that is being written is left out.

    Raises `StorageError` when it can't be read, `CorruptDataError` when it is damaged.
    """
    path = folder / "control" / "journal.log"
    try:
        identity = json.loads((folder / "run.json").read_bytes())
        journal = Journal(FilesystemBackend(folder), identity, recover=True, read_only=True)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}.", next_step="Check the mount and the file's rights.") from error
    except (ValueError, QueueError) as error:
        raise CorruptDataError(
            f"{path}: the journal can't be read ({error}).",
            next_step="Start the run once, so that a damaged end is cut off, or restore the journal from a copy.",
        ) from error
    try:
        transactions: list[list[Event]] = journal.transactions
    finally:
        journal.close()
    result = replay(event for transaction in transactions for event in transaction)
    result.num_transactions, result.journal_bytes = len(transactions), path.stat().st_size
    return result


def replay(events: Iterable[Event]) -> Replay:
    """The state that a journal's events add up to; those that are about no task (readers, consumers) change nothing.

    Raises `CorruptDataError` for an event of an unknown kind about a task.
    """
    state = Replay()
    for event in events:
        _apply(state, event)
    return state


def _apply(state: Replay, event: Event) -> None:
    match event["type"]:
        case "Submitted":
            for spec in event["tasks"]:
                task = {"spec": spec, "state": "pending", "generation": 0, "lease": None, "failure": None}
                state.tasks[spec["task_id"]] = task
                state.history[spec["task_id"]].append(TaskEvent("submitted", 0))
            state.producer_state = event.get("producer_state") or state.producer_state
        case "Leased":
            for lease in event["leases"]:
                task = state.tasks[lease["task_id"]]
                task.update(state="leased", generation=lease["generation"], lease=lease)
                happened = TaskEvent("leased", lease["generation"], lease["worker_id"])
                state.history[lease["task_id"]].append(happened)
        case "Failed":
            for task_id in event["task_ids"]:
                dropped = event["response"] == "failed"
                _end(state, task_id, event["response"], "dropped" if dropped else "retried")
                state.tasks[task_id]["failure"] = event["failure"]
        case "Yielded":
            state.tasks[event["task_id"]]["spec"] |= _changes(event)
            accepted = (event.get("metadata") or {}).get("position") is not None
            _end(state, event["task_id"], "pending", "accepted" if accepted else "returned")
        case "TaskProgress":
            state.tasks[event["task_id"]]["spec"] |= _changes(event)
        case "Cancelled":
            _end(state, event["task_id"], "cancelled", "cancelled")
        case "Expired":
            for task_id in event["task_ids"]:
                _end(state, task_id, "pending", "expired")
        case "Epoch":
            for task_id in event["revoked"]:
                _end(state, task_id, "pending", "revoked")
        case kind if event.keys() & {"task_id", "task_ids"}:
            raise CorruptDataError(
                f"A journal has an event {kind!r}, which this vime doesn't know.",
                next_step="Use the vime that wrote the run, or a newer one.",
            )


def _changes(event: Event) -> dict[str, Any]:
    names = ("input_ref", "priority", "scheduling_key", "metadata")
    return {name: event[name] for name in names if event.get(name) is not None}


def _end(state: Replay, task_id: str, new_state: str, what: str) -> None:
    task = state.tasks[task_id]
    task["state"] = new_state
    state.history[task_id].append(TaskEvent(what, task["generation"]))
