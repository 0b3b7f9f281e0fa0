"""The queue of a pool as the disk tells it: for looking in, on live and dead runs, without lock and without a write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import straw

from storage.facts import TASK_PREFIX, drop_reason, group_of, sort_out
from storage.journal_replay import Replay, TaskEvent, read_journal, segment_folders
from storage.positions import first_position
from storage.queue_types import ClosedSegment, QueueFacts
from storage.refs import PoolRef, from_straw_ref
from storage.segments import SegmentEntry, queue_file, read_segments
from vime.data.cursor import PromptCursor
from vime.errors import CorruptDataError, StorageError

REQUEUED_FROM = "requeued_from"
"""Key in a task's metadata: the dropped group whose prompt it takes up again."""


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """One group as its segment's journal tells it."""

    group_index: int
    segment: int
    state: str
    """fresh (never leased), leased, waiting (leased before), accepted or dropped."""
    attempt: int
    """Leases that it has had."""
    worker: str | None
    """Who holds the lease; None when nobody does."""
    attempt_id: str | None
    """Of the present lease."""
    position: int | None
    """Of an accepted group."""
    reason: str | None
    """Of a dropped group."""
    requeued_from: int | None
    """The dropped group whose prompt this one takes up again."""
    prompt_ref: PoolRef
    result_ref: PoolRef | None
    """Of an accepted group."""


@dataclass(frozen=True)
class SegmentView:
    """One segment whose journal was read."""

    entry: SegmentEntry
    replay: Replay

    def groups(self) -> Iterator[GroupView]:
        """Its groups, by index."""
        for task_id in sorted(self.replay.tasks, key=group_of):
            yield self._group(task_id, self.replay.tasks[task_id])

    def group(self, group_index: int) -> GroupView | None:
        """One group, None when it is of another segment."""
        task_id = f"{TASK_PREFIX}{group_index}"
        task = self.replay.tasks.get(task_id)
        return None if task is None else self._group(task_id, task)

    def history(self, group_index: int) -> list[TaskEvent]:
        """What happened to a group of this segment."""
        return list(self.replay.history.get(f"{TASK_PREFIX}{group_index}", []))

    def cursor(self) -> PromptCursor:
        """Where the prompts stood after its newest submission."""
        if self.replay.producer_state is None:
            return self.entry.cursor
        return msgspec.convert(self.replay.producer_state, PromptCursor)

    def _group(self, task_id: str, task: dict[str, Any]) -> GroupView:
        receipt = self.replay.receipts.get(task_id)
        leased = task["state"] == "leased"
        return GroupView(
            group_index=group_of(task_id),
            segment=self.entry.index,
            state=_state(task),
            attempt=task["generation"],
            worker=task["lease"]["worker_id"] if leased else None,
            attempt_id=task["lease"]["attempt_id"] if leased else None,
            position=None if receipt is None else first_position(self.entry.index) + receipt["position"],
            reason=drop_reason(task) if task["state"] == "failed" else None,
            requeued_from=task["spec"]["metadata"].get(REQUEUED_FROM),
            prompt_ref=from_straw_ref(straw.RecordSetRef.from_dict(task["spec"]["input_ref"])),
            result_ref=None if receipt is None else from_straw_ref(straw.RecordSetRef.from_dict(receipt["result_ref"])),
        )


class QueueView:
    """The segments of a queue at one moment. Journals of open segments are read at once, the others when asked for."""

    def __init__(self, root: Path) -> None:
        """Read the queue of the pool in `root`. Raises `StorageError`."""
        self.root = root
        path = queue_file(self.control_dir)
        if not path.exists():
            raise StorageError(f"{root} holds no queue ({path} does not exist).", next_step="Check the path.")
        self.entries = read_segments(path)
        self._folders = segment_folders(root)
        self._read: dict[int, SegmentView] = {}
        self.opened = [self.segment(entry.index) for entry in self.entries if entry.summary is None]

    @property
    def control_dir(self) -> Path:
        """Folder of vime's own small files."""
        return self.root / "vime"

    def segment(self, index: int) -> SegmentView:
        """A segment, open or closed, with its journal. Raises `StorageError`."""
        if index not in self._read:
            entry = self.entries[index]
            if entry.queue_id not in self._folders:
                raise CorruptDataError(
                    f"{self.root}: queue {entry.queue_id} is missing.", next_step="Restore the pool from a copy."
                )
            self._read[index] = SegmentView(entry, read_journal(self._folders[entry.queue_id]))
        return self._read[index]

    def all_segments(self) -> list[SegmentView]:
        """Every segment, oldest first; reads the journals of closed ones."""
        return [self.segment(entry.index) for entry in self.entries]

    def with_group(self, group_index: int) -> SegmentView | None:
        """The segment that a group was submitted to, None when it wasn't."""
        index = sum(entry.cursor.next_group_index <= group_index for entry in self.entries) - 1
        segment = self.segment(max(index, 0))
        return segment if segment.group(group_index) is not None else None

    def cursor(self) -> PromptCursor:
        """Where the prompts stand."""
        return self.opened[-1].cursor()

    def facts(self) -> QueueFacts:
        """Where every group is, as `storage.queue.GroupQueue.facts` tells it of an open queue."""
        closed = [
            ClosedSegment(first_position(entry.index), entry.summary.num_accepted, entry.summary.dropped)
            for entry in self.entries
            if entry.summary is not None
        ]
        facts = QueueFacts([], [], {}, {}, closed, self.cursor())
        for segment in self.opened:
            start = first_position(segment.entry.index)
            positions = [(task_id, start + r["position"]) for task_id, r in segment.replay.receipts.items()]
            sort_out(segment.replay.tasks, positions, facts)
        return facts


def _state(task: dict[str, Any]) -> str:
    named = {"completed": "accepted", "failed": "dropped", "leased": "leased"}
    return named.get(task["state"]) or ("waiting" if task["generation"] else "fresh")
