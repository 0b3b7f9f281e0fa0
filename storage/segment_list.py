"""All segments of a queue: which are open, which one a lease or a position belongs to, and how the queue rotates."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec

from storage.pool import Pool
from storage.positions import SEGMENT_SPAN, PositionRanges, first_position, segment_of
from storage.refs import Lease
from storage.segment import Segment
from storage.segments import SegmentEntry, queue_file, read_segments, write_segments
from vime.data.cursor import PromptCursor
from vime.errors import CorruptDataError, StorageError

MAX_SEGMENT_GROUPS = 1000
"""A rotation opens a new segment when the newest one holds so many groups,"""
MAX_JOURNAL_BYTES = 8 * 2**20
"""or when its journal has so many bytes."""


class SegmentList:
    """The open segments of one pool. Not thread-safe; belongs to the holder of the coordinator lock."""

    def __init__(self, pool: Pool, *, owner: str, clock: Callable[[], float]) -> None:
        """Open what is not closed, or create the first segment. Raises `StorageError`."""
        self._pool, self._owner, self.clock = pool, owner, clock
        self._newest_serial = 0
        self._path = queue_file(pool.control_dir)
        self._open: dict[int, Segment] = {}
        try:
            if self._path.exists():
                self.entries = read_segments(self._path)
            else:
                first = self._create(0, PromptCursor())
                self.entries = [first.entry]
                write_segments(self._path, self.entries)
                self._open[0] = first
            for entry in self.entries:
                if entry.summary is None:
                    self.at(entry.index)
        except StorageError:
            self.close()
            raise

    @property
    def newest(self) -> Segment:
        """The segment that takes new prompts."""
        return self._open[len(self.entries) - 1]

    def opened(self) -> list[Segment]:
        """Open segments, oldest first."""
        return [self._open[index] for index in sorted(self._open)]

    def closed(self) -> list[SegmentEntry]:
        """Entries of the segments that are not open, oldest first; each has its summary."""
        return [entry for entry in self.entries if entry.index not in self._open]

    def is_open(self, index: int) -> bool:
        return index in self._open

    def is_reclaimed(self, index: int) -> bool:
        """Whether a segment has ended for good, so that its journal may be gone."""
        return self.entries[index].is_reclaimed

    def next_serial(self) -> int:
        """A number for the next lease."""
        self._newest_serial += 1
        return self._newest_serial

    def newest_serial(self) -> int:
        """The number of the newest lease; 0 before the first."""
        return self._newest_serial

    def oldest_serial(self) -> int:
        """The number of the oldest lease that is out; above all numbers when none is."""
        serials = (held.serial for segment in self.opened() for held in segment.held.values())
        return min(serials, default=self._newest_serial + 1)

    def next_order(self) -> int:
        """A number for the next return: above that of every group that waits or is leased."""
        states = itertools.chain(
            (state for segment in self.opened() for state in segment.waiting.values()),
            (held.state for segment in self.opened() for held in segment.held.values()),
        )
        return 1 + max((state.notes.order for state in states), default=0)

    def at(self, index: int) -> Segment:
        """A segment by index; a closed one is opened again, until the next rotation.

        Raises `StorageError` for one that was reclaimed.
        """
        if self.is_reclaimed(index):
            raise StorageError(
                f"Segment {index} of the queue in {self._pool.root} was reclaimed: its groups are trained or dropped, "
                "and no commit that is kept needs them.",
                next_step="Choose a newer commit, or turn --rollout-queue-online-gc off for runs that go back far.",
            )
        if index not in self._open:
            segment = Segment.recover(self._pool, self.entries[index], owner=self._owner, clock=self.clock)
            self._open[index] = segment
            self._check_end(segment)
        return self._open[index]

    def index_of(self, lease: Lease) -> int:
        """Index of the segment that gave out a lease. Raises `StorageError` for a lease of another pool."""
        for entry in reversed(self.entries):
            if entry.queue_id == lease.queue_id:
                return entry.index
        raise StorageError(
            f"{lease.task_id}: its lease is of queue {lease.queue_id}, which is not in pool {self._pool.root}.",
            next_step="Use leases of this pool.",
        )

    def with_group(self, group_index: int) -> Segment:
        """The segment that a submitted group belongs to."""
        index = sum(entry.cursor.next_group_index <= group_index for entry in self.entries) - 1
        return self.at(max(index, 0))

    def num_accepted(self, index: int) -> int:
        """Accepted groups of a segment, open or closed; 0 when there is no such segment."""
        if not 0 <= index < len(self.entries):
            return 0
        summary = self.entries[index].summary
        return self._open[index].num_accepted if summary is None else summary.num_accepted

    def reopen(self, trained: PositionRanges) -> None:
        """Open those closed segments that hold a group which is not in `trained`.

        Raises `CorruptDataError` when `trained` holds positions that no segment has accepted.
        """
        for first, last in trained.ranges():
            allowed = self.num_accepted(segment_of(first))
            if last - first_position(segment_of(first)) >= allowed:
                raise CorruptDataError(
                    f"positions {first}..{last} are called trained, but segment {segment_of(first)} of the queue in "
                    f"{self._pool.root} (positions from {first_position(segment_of(first))}) has accepted {allowed}.",
                    next_step=f"Resume from an older commit; {self._pool.control_dir / 'repairs.jsonl'} tells "
                    "whether the end of its journal was cut.",
                )
        for entry in self.closed():
            start = first_position(entry.index)
            if entry.summary is None or entry.summary.reclaimed:
                continue
            if trained.count_between(start, start + SEGMENT_SPAN - 1) < entry.summary.num_accepted:
                self.at(entry.index)

    def rotate(self, ended: PositionRanges, *, reclaim: bool = False) -> None:
        """Close the segments whose groups are all dropped or in `ended`, and begin a new one when the newest is full.

        With `reclaim` they are closed for good, and so are those that were closed before. One replacement of
        `queue.json` makes all of it true: a kill before leaves the old list (and a straw queue that nothing names), a
        kill after it the new one.
        """
        newest = self.newest
        starting = newest.num_groups() >= MAX_SEGMENT_GROUPS or newest.journal_bytes() >= MAX_JOURNAL_BYTES
        entries = list(self.entries)
        finished = []
        for segment in self.opened():
            if segment is newest and not starting:
                continue
            summary = segment.summary_if_finished(ended)
            if summary is not None:
                finished.append(segment.entry.index)
                entries[segment.entry.index] = msgspec.structs.replace(segment.entry, summary=summary)
        if reclaim:
            entries = [_reclaimed(entry, ended) for entry in entries]
        successor = self._create(len(entries), newest.cursor()) if starting else None
        if successor is not None:
            entries.append(successor.entry)
        if entries != self.entries:
            try:
                write_segments(self._path, entries)
            except StorageError:
                if successor is not None:
                    successor.close()
                raise
            self.entries = entries
        if successor is not None:
            self._open[successor.entry.index] = successor
        for index in finished:
            self._open.pop(index).close()

    def close(self) -> None:
        """Close all open segments; may be called twice."""
        while self._open:
            self._open.popitem()[1].close()

    def _create(self, index: int, cursor: PromptCursor) -> Segment:
        return Segment.create(self._pool, index, cursor, owner=self._owner, clock=self.clock)

    def _check_end(self, segment: Segment) -> None:
        """A segment must reach to where the next one begins: else its journal has lost submitted groups."""
        index = segment.entry.index
        if index + 1 < len(self.entries) and segment.cursor() != self.entries[index + 1].cursor:
            raise CorruptDataError(
                f"segment {index} of the queue in {self._pool.root} ends at group "
                f"{segment.cursor().next_group_index}, the next one begins at "
                f"{self.entries[index + 1].cursor.next_group_index}: submitted groups are missing.",
                next_step="Restore its journal from a copy.",
            )


def _reclaimed(entry: SegmentEntry, ended: PositionRanges) -> SegmentEntry:
    """A closed segment as one that is closed for good, when all its accepted groups are in `ended`."""
    if entry.summary is None or entry.summary.reclaimed:
        return entry
    start = first_position(entry.index)
    if ended.count_between(start, start + SEGMENT_SPAN - 1) < entry.summary.num_accepted:
        return entry
    return msgspec.structs.replace(entry, summary=msgspec.structs.replace(entry.summary, reclaimed=True))
