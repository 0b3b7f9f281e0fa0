"""All groups of a queue in memory and where each of them stands. Pure: no lock, no clock, no payload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from storage.memory_group import MemoryGroup
from storage.positions import PositionRanges, first_position, segment_of
from storage.queue_types import AcceptedGroup, ClosedSegment, MemorySnapshot, QueueFacts
from storage.refs import GroupRef, PoolRef
from storage.summary import GroupSummary
from vime.data.cursor import PromptCursor
from vime.errors import CorruptDataError, StorageError


class GroupTable:
    """Groups by index, until they are trained or dropped and left behind; from then on they are counted."""

    def __init__(self) -> None:
        self.groups: dict[int, MemoryGroup] = {}
        self.cursor = PromptCursor()
        self._by_position: dict[int, MemoryGroup] = {}
        self._left_behind = PositionRanges()
        """Positions of trained groups that are not kept one by one any more."""
        self._dropped_before: Counter[str] = Counter()
        self._segment = 0
        """Positions of one process have a segment of their own, so that they never equal those of a commit before."""
        self._num_accepted_here = 0

    def restore(
        self, snapshot: MemorySnapshot, trained: PositionRanges, indices: Sequence[int], cursor: PromptCursor
    ) -> None:
        """Begin where a commit stood; the groups `indices`, its unfinished ones, are to be added next.

        Raises `CorruptDataError` when the parts don't cover all groups before `cursor`, which is the commit's.
        """
        expected = [index for first, last in snapshot.unfinished for index in range(first, last + 1)]
        num_dropped = sum(snapshot.dropped.values())
        covered = len(trained) + len(expected) + num_dropped
        if list(indices) != expected or covered != cursor.next_group_index:
            raise CorruptDataError(
                f"The commit has {len(trained)} trained, {len(expected)} unfinished and {num_dropped} dropped groups "
                f"of {cursor.next_group_index}, and the prompts of {len(indices)} were read again.",
                next_step="Resume from another commit.",
            )
        self._left_behind = PositionRanges(trained.ranges())
        self._dropped_before = Counter(snapshot.dropped)
        self._segment = max((segment_of(last) + 1 for _, last in trained.ranges()), default=0)
        self.cursor = cursor

    def is_new(self, indices: Sequence[int], digests: Sequence[str], cursor: PromptCursor) -> bool:
        """Whether a submission of prompts with these digests is to be added; False when it was before.

        Raises `StorageError` when it skips groups, or differs from what was submitted under the same indices.
        """
        following = self.cursor.next_group_index
        if indices[0] == following:
            return True
        if indices[0] > following:
            raise StorageError(
                f"Prompts start at group {indices[0]}, the queue continues at {following}.",
                next_step="Take prompts from the queue's own cursor.",
            )
        for index, digest in zip(indices, digests, strict=True):
            group = self.groups.get(index)
            if index >= following or (group is not None and group.prompt_digest != digest):
                raise StorageError(
                    f"Groups {indices[0]}..{indices[-1]} were submitted before, and group {index} "
                    + ("is missing." if index >= following else "has another prompt."),
                    next_step="Check that the prompt file and its settings have not changed.",
                )
        if cursor.next_group_index == following and cursor != self.cursor:
            raise StorageError(f"Groups up to {indices[-1]} were submitted with cursor {self.cursor}, found {cursor}.")
        return False

    @property
    def num_accepted(self) -> int:
        """Number of groups that were ever accepted."""
        return len(self._left_behind) + len(self._by_position)

    def accepted_positions(self) -> PositionRanges:
        """Positions of all groups that were ever accepted."""
        return PositionRanges([*self._left_behind.ranges(), *PositionRanges.of(self._by_position).ranges()])

    def accept(self, group: MemoryGroup, attempt_id: str, ref: GroupRef, summary: GroupSummary) -> int:
        """End a group with its result; its position."""
        position = first_position(self._segment) + self._num_accepted_here
        self._num_accepted_here += 1
        group.end(attempt_id, accepted=AcceptedGroup(position, group.index, ref, summary))
        self._by_position[position] = group
        return position

    def accepted(self, except_for: PositionRanges) -> list[AcceptedGroup]:
        """Accepted groups that are kept, by position, but for those in `except_for`."""
        found = (group.accepted for _, group in sorted(self._by_position.items()))
        return [item for item in found if item is not None and item.position not in except_for]

    def refs_at(self, positions: Sequence[int]) -> list[PoolRef]:
        """Everything that was published for the groups at these positions that are kept."""
        groups = (self._by_position[position] for position in positions if position in self._by_position)
        return [ref for group in groups for ref in group.refs]

    def check_accepted(self, positions: Sequence[int], what: str) -> None:
        """Raise `StorageError` unless every position is one of the accepted groups."""
        bad = [p for p in positions if p not in self._by_position and p not in self._left_behind]
        if bad:
            start = first_position(self._segment)
            last = start + self._num_accepted_here - 1
            allowed = f"{start}..{last}" if last >= start else "none"
            raise StorageError(
                f"{what}: positions {bad[:5]} are not accepted, allowed in segment {self._segment}: {allowed}."
            )

    def check_trained(self, trained: PositionRanges) -> None:
        """Raise `CorruptDataError` unless every position in `trained` is accepted."""
        known = self.accepted_positions()
        for first, last in trained.ranges():
            found = known.count_between(first, last)
            if found != last - first + 1:
                raise CorruptDataError(
                    f"positions {first}..{last} are called trained, but the queue in memory has accepted {found} of "
                    "them.",
                    next_step="Resume from a commit of this run.",
                )

    def leave_behind(self, trained: PositionRanges) -> list[PoolRef]:
        """Only count from now on what is in `trained` or dropped; what was published for the dropped ones."""
        refs: list[PoolRef] = []
        for group in list(self.groups.values()):
            if group.accepted is not None and group.accepted.position in trained:
                self._left_behind.update([group.accepted.position])
                del self._by_position[group.accepted.position]
            elif group.dropped is not None:
                self._dropped_before[group.dropped] += 1
                refs += group.refs
            else:
                continue
            del self.groups[group.index]
        return refs

    def facts(self) -> QueueFacts:
        """Where every group is. Trained groups that were left behind are counted by ranges of positions."""
        closed = [ClosedSegment(first, last - first + 1, {}) for first, last in self._left_behind.ranges()]
        if self._dropped_before:
            closed.append(ClosedSegment(0, 0, dict(self._dropped_before)))
        facts = QueueFacts([], [], {}, {}, closed, self.cursor)
        for index, group in sorted(self.groups.items()):
            if group.accepted is not None:
                facts.accepted[index] = group.accepted.position
            elif group.dropped is not None:
                facts.dropped[index] = group.dropped
            else:
                (facts.in_flight if group.attempts else facts.fresh).append(index)
        return facts

    def snapshot(self, trained: PositionRanges) -> MemorySnapshot:
        """What a commit that calls `trained` trained must keep."""
        dropped = self._dropped_before + Counter(
            group.dropped for group in self.groups.values() if group.dropped is not None
        )
        unfinished = PositionRanges.of(
            index
            for index, group in self.groups.items()
            if group.dropped is None and (group.accepted is None or group.accepted.position not in trained)
        )
        return MemorySnapshot(unfinished.ranges(), dict(dropped))
