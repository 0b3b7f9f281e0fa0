"""The queue of a pool as the disk tells it: for looking in, on live and dead runs, without lock and without a write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from storage.facts import GroupPhase, group_of, group_state, group_states, sort_out, task_of
from storage.journal_replay import Replay, TaskEvent, read_journal, segment_folders
from storage.positions import first_position
from storage.queue_types import ClosedSegment, QueueFacts, Stage
from storage.refs import PoolRef
from storage.segments import SegmentEntry, queue_file, read_segments
from vime.data.cursor import PromptCursor
from vime.errors import CorruptDataError, StorageError


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
            yield self._group(self.replay.tasks[task_id])

    def group(self, group_index: int) -> GroupView | None:
        """One group, None when it is of another segment."""
        task = self.replay.tasks.get(task_of(group_index))
        return None if task is None else self._group(task)

    def history(self, group_index: int) -> list[TaskEvent]:
        """What happened to a group of this segment."""
        return list(self.replay.history.get(task_of(group_index), []))

    def cursor(self) -> PromptCursor:
        """Where the prompts stood after its newest submission."""
        if self.replay.producer_state is None:
            return self.entry.cursor
        return msgspec.convert(self.replay.producer_state, PromptCursor)

    def _group(self, task: dict[str, Any]) -> GroupView:
        state = group_state(task)
        accepted, leased = state.phase is GroupPhase.ACCEPTED, state.phase is GroupPhase.LEASED
        local = state.notes.position
        if state.notes.prompt is None:
            raise CorruptDataError(f"Group {state.group_index}: its entry in the queue doesn't name its prompt.")
        return GroupView(
            group_index=state.group_index,
            segment=self.entry.index,
            state=state.phase.value,
            attempt=task["generation"],
            worker=task["lease"]["worker_id"] if leased else None,
            attempt_id=task["lease"]["attempt_id"] if leased else None,
            position=None if local is None else first_position(self.entry.index) + local,
            reason=state.reason if state.phase is GroupPhase.DROPPED else None,
            requeued_from=state.notes.requeued_from,
            prompt_ref=state.notes.prompt,
            result_ref=state.ref if accepted else None,
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
        """A segment, open or closed, with its journal. Raises `StorageError`, also for one that was reclaimed."""
        if index not in self._read:
            entry = self.entries[index]
            if entry.is_reclaimed:
                raise StorageError(
                    f"Segment {index} of the queue in {self.root} was reclaimed: its groups have ended, and only "
                    "their counts are left."
                )
            if entry.queue_id not in self._folders:
                raise CorruptDataError(
                    f"{self.root}: queue {entry.queue_id} is missing.", next_step="Restore the pool from a copy."
                )
            self._read[index] = SegmentView(entry, read_journal(self._folders[entry.queue_id]))
        return self._read[index]

    def all_segments(self) -> list[SegmentView]:
        """Every segment that was not reclaimed, oldest first; reads the journals of closed ones."""
        return [self.segment(entry.index) for entry in self.entries if not entry.is_reclaimed]

    def with_group(self, group_index: int) -> SegmentView | None:
        """The segment that a group was submitted to, None when it wasn't or when the segment was reclaimed."""
        index = sum(entry.cursor.next_group_index <= group_index for entry in self.entries) - 1
        if self.entries[max(index, 0)].is_reclaimed:
            return None
        segment = self.segment(max(index, 0))
        return segment if segment.group(group_index) is not None else None

    def cursor(self) -> PromptCursor:
        """Where the prompts stand."""
        return self.opened[-1].cursor()

    def partial_refs(self) -> list[PoolRef]:
        """Payloads of the groups of open segments of which some member has a response, and that go on from it."""
        states = (state for segment in self.opened for state in group_states(segment.replay.tasks))
        going_on = (GroupPhase.WAITING, GroupPhase.LEASED)
        return [state.ref for state in states if state.phase in going_on and state.stage is Stage.PARTIAL]

    def facts(self) -> QueueFacts:
        """Where every group is, as `storage.queue.GroupQueue.facts` tells it of an open queue."""
        closed = [
            ClosedSegment(first_position(entry.index), entry.summary.num_accepted, entry.summary.dropped)
            for entry in self.entries
            if entry.summary is not None
        ]
        facts = QueueFacts([], [], {}, {}, closed, self.cursor())
        for segment in self.opened:
            sort_out(group_states(segment.replay.tasks), first_position(segment.entry.index), facts)
        return facts
