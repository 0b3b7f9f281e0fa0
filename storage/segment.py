"""One open segment: straw's coordinator for it, and what the queue remembers of its groups."""

from __future__ import annotations

import json
import logging
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import straw

from storage.facts import committed_cursor, drop_reason
from storage.pool import Pool
from storage.positions import PositionRanges, first_position
from storage.repair import cut_damaged_tail
from storage.segments import SegmentEntry, SegmentSummary
from storage.straw_errors import translated
from storage.summary import GroupSummary
from vime.data.cursor import PromptCursor
from vime.errors import CorruptDataError

logger = logging.getLogger(__name__)

_PAGE = 1000
"""Most commits that straw returns in one call."""
_TERMINAL = {"completed", "failed"}


class Segment:
    """A segment that can be read and changed. Positions here are global."""

    def __init__(self, entry: SegmentEntry, coordinator: straw.Coordinator) -> None:
        self.entry = entry
        self.coordinator = coordinator
        self.first_position = first_position(entry.index)
        self.summaries: dict[int, GroupSummary] = {}
        """By position: of those groups that this process has seen."""
        self.num_accepted = len(self.commits(self.first_position))

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

    def cursor(self) -> PromptCursor:
        """The prompt cursor after the segment's newest submission."""
        return committed_cursor(self.coordinator) or self.entry.cursor

    def num_groups(self) -> int:
        """Groups that were submitted to this segment."""
        return self.cursor().next_group_index - self.entry.cursor.next_group_index

    def journal_bytes(self) -> int:
        return int(self.coordinator.metrics()["journal_bytes"])

    def commits(self, position: int) -> list[straw.CommitReceipt]:
        """Receipts of accepted groups from a (global) position on; their own positions are straw's, from 0."""
        receipts: list[straw.CommitReceipt] = []
        local = position - self.first_position
        while page := self.coordinator.read_commits(local, _PAGE).commits:
            receipts += page
            local += len(page)
        return receipts

    def summary_if_finished(self, trained: PositionRanges) -> SegmentSummary | None:
        """The segment's summary when every group of it is dropped, or accepted and in `trained`; None before."""
        if trained.count_between(self.first_position, self.first_position + self.num_accepted - 1) < self.num_accepted:
            return None
        if not self.coordinator.metrics()["tasks"].keys() <= _TERMINAL:
            return None
        tasks: dict[str, dict[str, Any]] = self.coordinator.tasks
        dropped = Counter(drop_reason(task) for task in tasks.values() if task["state"] == "failed")
        return SegmentSummary(self.num_accepted, dict(dropped))

    def close(self) -> None:
        self.coordinator.close()


def journal_path(root: Path, queue_id: str) -> Path:
    """The journal of a straw queue. Raises `CorruptDataError` when the pool has no such queue."""
    for path in (root / "queues").glob("*/run.json"):
        if json.loads(path.read_bytes())["queue_id"] == queue_id:
            return path.parent / "control" / "journal.log"
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
