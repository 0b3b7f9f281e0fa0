"""An independent count of a stopped run: from the queue's raw journals and the ranks' training logs.

It shares no code with the queue, the planner or the accounting that did the work: it replays the journals' events
itself, and trusts only what the ranks wrote after each optimizer step.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from straw import RecordSetRef, SharedFilesystemStore
from straw.backend import FilesystemBackend
from straw.errors import QueueError
from straw.journal import Journal

from recovery.audit_parts import (
    AuditReport,
    branch_limits,
    newest_commit,
    partly_trained,
    raw_record,
    read_branches_raw,
    sample_twice,
    split_steps,
    training_steps,
)
from recovery.memory_audit import audit_memory_run, is_in_memory
from recovery.run_location import locate_run
from storage.segments import refuse_other_schema
from vime.errors import CorruptDataError, StorageError

_SEGMENT_SPAN = 2**40
"""Positions of one segment; those of the next begin there."""


@dataclass
class JournalState:
    """What the journal's events add up to. Groups are task ids."""

    submitted: list[str] = field(default_factory=list)
    leased: set[str] = field(default_factory=set)
    accepted: dict[str, int] = field(default_factory=dict)
    """Task id -> position."""
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    accepted_twice: list[str] = field(default_factory=list)
    wrong_summaries: list[str] = field(default_factory=list)
    """Closed segments whose summary is not what their journal says."""
    reclaimed: set[str] = field(default_factory=set)
    """Groups of segments whose journals are gone; what is known of them is the counts of their summaries."""
    reclaimed_accepted: int = 0
    reclaimed_dropped: Counter[str] = field(default_factory=Counter)
    released: list[tuple[int, int]] = field(default_factory=list)
    """Positions whose payloads may be gone, as ranges."""


def audit_run(run: Path, pool: Path | None = None) -> AuditReport:
    """Audit a run folder whose processes have stopped. `pool` is the queue's root; found from the run folder if None.

    A run whose queue was in memory is audited by `recovery.memory_audit`.

    Raises:
        NoRunError: there is no run, or no queue of it.
        CorruptDataError: the journal can't be read.
        SchemaVersionError: another layout of the queue wrote it.
        StorageError: the pool can't be opened.
    """
    if is_in_memory(run):
        return audit_memory_run(run)
    pool = locate_run(run, pool).pool
    state = replay_journals(pool)
    branches = read_branches_raw(run)
    log = list(training_steps(run))
    counted = branch_limits(branches, log)
    trained_steps, rolled_back = split_steps(log, counted)
    trained = {group for _, groups, _ in trained_steps for group in groups}
    twice = sample_twice(trained_steps)
    lost = [
        *_skipped_prompts(state),
        *_unreadable(pool, state),
        *(f"{task}: accepted twice" for task in state.accepted_twice),
        *state.wrong_summaries,
        *_not_trained_as_committed(run, branches, counted, state, trained),
        *partly_trained(trained_steps),
        *(
            f"group {group}: trained but never accepted"
            for group in sorted(trained)
            if _task(group) not in state.accepted and _task(group) not in state.reclaimed
        ),
    ]
    undone = {group for _, groups, _ in rolled_back for group in groups}
    gone = _gone_untrained(state, trained)
    dropped = Counter(state.dropped.values()) + state.reclaimed_dropped + Counter({"reclaimed": gone})
    in_flight = [task for task in state.leased if task not in state.accepted and task not in state.dropped]
    return AuditReport(
        generated=len(state.leased) + len(state.reclaimed),
        trained=len(trained),
        pending=len(state.accepted) + state.reclaimed_accepted - len(trained) - gone,
        in_flight=len(in_flight),
        dropped=dict(dropped),
        rolled_back=len(undone),
        lost=lost,
        trained_twice=twice,
    )


def replay_journals(pool: Path) -> JournalState:
    """Replay the journals of all segments of the queue, oldest first, read-only."""
    state = JournalState()
    released = pool / "vime" / "released.json"
    if released.exists():
        state.released = [(first, last) for first, last in raw_record(released, "ranges")["ranges"]]
    segments = _segments(pool)
    for number, segment in enumerate(segments):
        if (segment.get("summary") or {}).get("reclaimed"):
            _count_reclaimed(state, segment, segments[number + 1])
            continue
        before = (len(state.accepted), len(state.dropped))
        for event in _events(pool, segment["queue_id"]):
            _apply(state, event, number * _SEGMENT_SPAN)
        summary = segment.get("summary")
        if summary is not None:
            found = (len(state.accepted) - before[0], len(state.dropped) - before[1])
            expected = (summary["num_accepted"], sum(summary["dropped"].values()))
            if found != expected:
                state.wrong_summaries.append(
                    f"segment {number}: closed with {expected[0]} accepted and {expected[1]} dropped groups, "
                    f"its journal has {found[0]} and {found[1]}"
                )
    return state


def _count_reclaimed(state: JournalState, segment: dict[str, Any], following: dict[str, Any]) -> None:
    """Take over what the summary of a segment without a journal says; the last segment always has one."""
    numbers = range(segment["cursor"]["next_group_index"], following["cursor"]["next_group_index"])
    tasks = [_task(number) for number in numbers]
    state.submitted += tasks
    state.reclaimed.update(tasks)
    state.reclaimed_accepted += segment["summary"]["num_accepted"]
    state.reclaimed_dropped.update(segment["summary"]["dropped"])


def _gone_untrained(state: JournalState, trained: set[int]) -> int:
    """Groups whose payloads may be gone, though the newest branch has not trained them."""
    accepted = {_task(group) for group in trained}
    listed = sum(_is_released(state, position) for task, position in state.accepted.items() if task not in accepted)
    return listed + state.reclaimed_accepted - len(state.reclaimed & accepted)


def _is_released(state: JournalState, position: int) -> bool:
    return any(first <= position <= last for first, last in state.released)


def _segments(pool: Path) -> list[dict[str, Any]]:
    """The segments that the pool's list names, oldest first."""
    path = pool / "vime" / "queue.json"
    try:
        listed = json.loads(path.read_bytes())
        version, segments = listed["schema_version"], listed.get("segments", [])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptDataError(f"{path} can't be read: {error!r}.", next_step="Restore it from a copy.") from error
    refuse_other_schema(path, version)
    if not segments:
        raise CorruptDataError(f"{path} lists no segments.", next_step="Restore it from a copy.")
    return list(segments)


def _events(pool: Path, queue_id: str) -> Iterator[dict[str, Any]]:
    try:
        root = _queue_root(pool, queue_id)
        identity = json.loads((root / "run.json").read_bytes())
        journal = Journal(FilesystemBackend(root), identity, recover=True, read_only=True)
    except (OSError, ValueError, QueueError) as error:
        raise CorruptDataError(
            f"{pool}: the journal of queue {queue_id} can't be read ({error}).",
            next_step="Start the run once, so that a damaged end is cut off, or restore the journal.",
        ) from error
    try:
        for transaction in journal.transactions:
            yield from transaction
    finally:
        journal.close()


def _queue_root(pool: Path, queue_id: str) -> Path:
    """Folder of one straw queue of the pool."""
    for path in (pool / "queues").glob("*/run.json"):
        if raw_record(path, "queue_id")["queue_id"] == queue_id:
            return path.parent
    raise CorruptDataError(f"{pool}: queue {queue_id} is missing.", next_step="Restore the pool.")


def _apply(state: JournalState, event: dict[str, Any], first_position: int) -> None:
    match event["type"]:
        case "Submitted":
            state.submitted += [task["task_id"] for task in event["tasks"]]
        case "Leased":
            state.leased.update(lease["task_id"] for lease in event["leases"])
        case "Yielded" if (event.get("metadata") or {}).get("position") is not None:
            task = event["task_id"]
            if task in state.accepted:
                state.accepted_twice.append(task)
            state.accepted[task] = first_position + event["metadata"]["position"]
            state.results[task] = event["input_ref"]
        case "Failed" if event["response"] == "failed":
            for task in event["task_ids"]:
                state.dropped[task] = str(event["failure"].get("reason", "unknown"))


def _skipped_prompts(state: JournalState) -> list[str]:
    expected = [_task(number) for number in range(len(state.submitted))]
    found = set(state.submitted)
    twice = [task for task, count in Counter(state.submitted).items() if count > 1]
    return [
        *(f"{task}: never submitted" for task in expected if task not in found),
        *(f"{task}: submitted twice" for task in twice),
    ]


def _unreadable(pool: Path, state: JournalState) -> list[str]:
    """Accepted groups whose payload does not match its digests."""
    newest = _segments(pool)[-1]["queue_id"]
    identity = raw_record(_queue_root(pool, newest) / "run.json", "run_id", "codecs")
    bad = []
    try:
        with SharedFilesystemStore(pool, identity["run_id"], codecs=identity["codecs"]) as store:
            for task, reference in state.results.items():
                if _is_released(state, state.accepted[task]):
                    continue
                try:
                    for _ in store.read(RecordSetRef.from_dict(reference)):
                        pass
                except QueueError as error:
                    bad.append(f"{task}: payload unreadable ({error})")
    except QueueError as error:
        raise StorageError(
            f"{pool}: the payloads can't be opened ({error}).", next_step="Free some space or correct the rights."
        ) from error
    return bad


def _task(group: int) -> str:
    return f"prompt:{group}"


def _not_trained_as_committed(
    run: Path,
    branches: dict[str, dict[str, Any]],
    counted: dict[str, int],
    state: JournalState,
    trained: set[int],
) -> list[str]:
    """Groups that the newest commit of the branch calls trained but that no rank logged."""
    newest = newest_commit(run, branches, counted)
    if newest is None:
        return []
    queue_state = raw_record(newest[1].with_name(f"queue_state_{newest[0]}.json"), "trained")
    by_position = {position: task for task, position in state.accepted.items()}
    bad = []
    for first, last in queue_state["trained"]:
        for position in range(first, last + 1):
            task = by_position.get(position)
            if task is None and _is_released(state, position):
                continue  # its segment has no journal any more
            if task is None or int(task.removeprefix("prompt:")) not in trained:
                bad.append(f"{task or f'position {position}'}: committed as trained, but no rank trained it")
    return bad
