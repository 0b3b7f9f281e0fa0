"""The running books of one branch: what has become of every group, without looking through the queue."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from pipeline.messages import QueueCounts
from recovery.accounting import RECLAIMED, Identity, count_identity
from storage.contracts import QueueOfGroups
from storage.positions import PositionRanges
from storage.queue_types import AcceptedGroup, QueueFacts

logger = logging.getLogger(__name__)


class BranchBooks:
    """Every group that was handed out is trained, pending, in flight, or dropped with a reason.

    They agree with the queue's facts at every moment, given that each change of the queue is entered.
    """

    def __init__(self, queue: QueueOfGroups, branch: str, trained_before: Sequence[tuple[int, int]]) -> None:
        """As the queue is now, of which all is opened that the branch has not trained.

        `trained_before` are the positions that were trained before the branch began, as ranges. Raises
        `CorruptDataError` when it has some that aren't accepted.
        """
        self.trained = PositionRanges([*trained_before, *queue.trained_by(branch).ranges()])
        queue.reopen(self.trained)
        self._reclaimed = queue.released.minus(self.trained)
        """Groups that other branches trained, and whose payloads may be gone; they count as dropped."""
        gone = PositionRanges([*self.trained.ranges(), *self._reclaimed.ranges()])
        self._waiting = {group.position: group for group in queue.accepted(except_for=gone)}
        facts = queue.facts()
        self._fresh, self._in_flight = set(facts.fresh), set(facts.in_flight)
        self._dropped = facts.dropped_by_reason()
        self._num_accepted = facts.num_accepted - len(self._reclaimed)
        if self._reclaimed:
            self._dropped[RECLAIMED] = len(self._reclaimed)
            logger.warning("%d groups of other branches were reclaimed and can't be trained", len(self._reclaimed))

    @property
    def waiting(self) -> list[AcceptedGroup]:
        """Groups that can be trained."""
        return list(self._waiting.values())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submitted(self, group_indices: Iterable[int]) -> None:
        """New groups."""
        self._fresh.update(group_indices)

    def leased(self, group_index: int) -> None:
        """A group that is new, or waits again."""
        self._fresh.discard(group_index)
        self._in_flight.add(group_index)

    def accepted(self, group: AcceptedGroup) -> None:
        """A group that is in flight; once more changes nothing, as when the answer to an earlier call was lost."""
        if group.group_index in self._in_flight:
            self._in_flight.remove(group.group_index)
            self._num_accepted += 1
        if group.position not in self.trained:
            self._waiting[group.position] = group

    def dropped(self, group_index: int, reason: str) -> None:
        """A group that is in flight; once more changes nothing."""
        if group_index in self._in_flight:
            self._in_flight.remove(group_index)
            self._dropped[reason] += 1

    def completed(self, positions: Iterable[int]) -> None:
        """These are trained."""
        for position in positions:
            self.trained.add(position, position)
            self._waiting.pop(position, None)

    def oldest_version(self, at_most: int) -> int:
        """Oldest policy version of a token that waits for its training; `at_most` where none is older."""
        versions = (v for group in self._waiting.values() for v in group.summary.min_versions if v is not None)
        return min([at_most, *versions])

    def newest_version(self, at_least: int) -> int:
        """Newest policy version of a token that waits for its training; `at_least` where none is newer."""
        versions = (v for group in self._waiting.values() for v in group.summary.max_versions if v is not None)
        return max([at_least, *versions])

    def identity(self, facts: QueueFacts) -> Identity:
        """Counted from the queue's facts; what `counts` has to agree with."""
        return count_identity(facts, self.trained, self._reclaimed)

    def counts(self, *, backpressured: bool, notices: list[str]) -> QueueCounts:
        """The same counts as `identity`: cheap enough for every step."""
        return QueueCounts(
            generated=self._num_accepted + len(self._in_flight) + self._dropped.total(),
            trained=len(self.trained),
            pending=self._num_accepted - len(self.trained),
            in_flight=len(self._in_flight),
            dropped=dict(self._dropped),
            fresh=len(self._fresh),
            backpressured=backpressured,
            notices=notices,
        )
