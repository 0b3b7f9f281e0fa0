"""One open segment: straw's coordinator for it, and what the queue remembers of its groups."""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import straw
from straw import protocol

from storage.facts import GroupPhase, GroupState, committed_cursor, group_state, group_states, task_of
from storage.journal_replay import segment_folders
from storage.pool import Pool
from storage.positions import PositionRanges, first_position
from storage.repair import cut_damaged_tail
from storage.segments import SegmentEntry, SegmentSummary
from storage.straw_errors import translated
from vime.data.cursor import PromptCursor
from vime.errors import CorruptDataError

logger = logging.getLogger(__name__)

_NO_TASK = ("none",)
"""straw ends expired leases whenever anything is leased; leasing a task that doesn't exist does only that."""


_WAITING = (GroupPhase.FRESH, GroupPhase.WAITING)


@dataclass
class HeldLease:
    """A lease that is out."""

    state: GroupState
    """The group as it was when it was leased."""
    lease: protocol.Lease
    deadline: float
    """On the clock of the segments, which counts in leases."""
    serial: int
    """Counts the leases of this process."""


class Segment:
    """A segment that can be read and changed. Positions here are global."""

    def __init__(self, entry: SegmentEntry, coordinator: straw.Coordinator) -> None:
        self.entry = entry
        self.coordinator = coordinator
        self.first_position = first_position(entry.index)
        groups = list(self.groups())
        accepted = [state for state in groups if state.phase is GroupPhase.ACCEPTED]
        self.packs_of_accepted = [packs_of(state) for state in sorted(accepted, key=_local_position)]
        """Packs that hold a group's result and prompt, for each accepted group in order."""
        self.waiting = {state.group_index: state for state in groups if state.phase in _WAITING}
        """Groups that can be leased, by index."""
        self.held: dict[str, HeldLease] = {}
        """Leases that this process has given out, by attempt id."""

    @classmethod
    def create(cls, pool: Pool, index: int, cursor: PromptCursor, *, owner: str, clock: Callable[[], float]) -> Segment:
        """A new segment that continues at `cursor`. It counts only once `queue.json` lists it.

        A straw queue whose creation was cut off can be neither created nor recovered, so each gets a new name.
        """
        entry = SegmentEntry(index, f"groups-{uuid.uuid4().hex}", cursor)
        return cls(entry, _straw_coordinator(pool, entry, owner, clock, recover=False))

    @classmethod
    def recover(cls, pool: Pool, entry: SegmentEntry, *, owner: str, clock: Callable[[], float]) -> Segment:
        """Open a segment that exists. A damaged end of its journal is cut off, with a report.

        Raises `CorruptDataError` for damage that is not at the end.
        """
        try:
            return cls(entry, _straw_coordinator(pool, entry, owner, clock, recover=True))
        except CorruptDataError:
            repair = cut_damaged_tail(journal_path(pool.root, entry.queue_id), pool.control_dir)
            if repair is None:
                raise
            logger.warning("%s", repair)
        return cls(entry, _straw_coordinator(pool, entry, owner, clock, recover=True))

    @property
    def num_accepted(self) -> int:
        """Groups that were accepted."""
        return len(self.packs_of_accepted)

    def cursor(self) -> PromptCursor:
        """The prompt cursor after the segment's newest submission."""
        return committed_cursor(self.coordinator) or self.entry.cursor

    def num_groups(self) -> int:
        """Groups that were submitted to this segment."""
        return self.cursor().next_group_index - self.entry.cursor.next_group_index

    def journal_bytes(self) -> int:
        return int(self.coordinator.metrics()["journal_bytes"])

    def groups(self) -> Iterator[GroupState]:
        """Every group of the segment, by index (time grows with their number)."""
        return group_states(self.coordinator.tasks)

    def group(self, group_index: int) -> GroupState | None:
        """One group, None when it is not of this segment."""
        task = self.coordinator.task_status(task_of(group_index))
        return None if task is None else group_state(task)

    def needed_packs(self, released: PositionRanges) -> set[str]:
        """Packs that hold a result which is not released, or what a group that has none starts from."""
        unfinished = [*self.waiting.values(), *(held.state for held in self.held.values())]
        kept = [
            packs
            for position, packs in enumerate(self.packs_of_accepted, self.first_position)
            if position not in released
        ]
        return set().union(*map(packs_of, unfinished), *kept)

    def end_expired_leases(self) -> None:
        """Let straw take back the groups whose leases have expired."""
        self.coordinator.acquire("sweep", 1, task_ids=_NO_TASK)

    def summary_if_finished(self, ended: PositionRanges) -> SegmentSummary | None:
        """The segment's summary when every group of it is dropped, or accepted and in `ended`; None before."""
        if ended.count_between(self.first_position, self.first_position + self.num_accepted - 1) < self.num_accepted:
            return None
        if self.waiting or self.held:
            return None
        if self.num_accepted == self.num_groups():
            return SegmentSummary(self.num_accepted, {})
        groups = list(self.groups())
        if any(state.phase not in (GroupPhase.ACCEPTED, GroupPhase.DROPPED) for state in groups):
            return None
        dropped = Counter(state.reason for state in groups if state.phase is GroupPhase.DROPPED)
        return SegmentSummary(self.num_accepted, dict(dropped))

    def close(self) -> None:
        self.coordinator.close()


def packs_of(state: GroupState) -> tuple[str, ...]:
    """Packs that hold a group's prompt, and what it starts from or resulted in."""
    return tuple(ref.path for ref in (state.ref, state.notes.prompt) if ref is not None)


def _local_position(state: GroupState) -> int:
    return state.notes.position or 0


def journal_path(root: Path, queue_id: str) -> Path:
    """The journal of a straw queue. Raises `CorruptDataError` when the pool has no such queue."""
    folder = segment_folders(root).get(queue_id)
    if folder is not None:
        return folder / "control" / "journal.log"
    raise CorruptDataError(f"{root}: queue {queue_id} is missing.", next_step="Restore the pool from a copy.")


def _straw_coordinator(
    pool: Pool, entry: SegmentEntry, owner: str, clock: Callable[[], float], *, recover: bool
) -> straw.Coordinator:
    """straw binds a queue to its lease time; here `clock` counts in leases, so that the setting may change."""
    with translated(f"open segment {entry.index} (queue {entry.queue_id})", pool.root):
        return straw.Coordinator(
            pool.store,
            queue_id=entry.queue_id,
            namespace=True,
            exclusive_owner=owner,
            recover=recover,
            lease_seconds=1,
            clock=clock,
        )
