"""What the queue hands out: plain structs that cross processes."""

from __future__ import annotations

import enum
from collections import Counter

import msgspec

from storage.refs import GroupRef, PoolRef
from storage.summary import GroupSummary
from vime.data.cursor import PromptCursor


class LeaseState(enum.Enum):
    """Answer to a heartbeat."""

    EXTENDED = "extended"
    EXPIRED = "expired"
    """Its deadline has passed; the group will be leased again."""
    STALE = "stale"
    """Another attempt, a result or a restart has taken its place."""


class Stage(enum.IntEnum):
    """What a waiting group starts from; later ones are leased first."""

    FRESH = 0
    """A prompt."""
    PARTIAL = 1
    """Members of which some have a response."""
    COMPLETED = 2
    """Members that are all finished and rewarded."""


class LeasedGroup(msgspec.Struct, frozen=True, gc=False):
    """The right to generate one group."""

    lease: bytes
    group_index: int
    prompt_ref: PoolRef
    """A blob for `storage.prompt_codec.decode_prompt` when the group is fresh; a stored group in the other stages."""
    attempt: int
    """Counts the leases of this group, from 1."""
    stage: Stage = Stage.FRESH
    min_version: int | None = None
    """Oldest policy version of the tokens that it has."""


class GroupResult(msgspec.Struct, frozen=True, gc=False):
    """A published group, ready to be accepted."""

    lease: bytes
    ref: GroupRef
    summary: GroupSummary


class GroupReturn(msgspec.Struct, frozen=True, gc=False):
    """A published group that goes back to the queue, so that any producer may go on with it."""

    lease: bytes
    ref: GroupRef
    stage: Stage
    """`Stage.PARTIAL` or `Stage.COMPLETED`."""
    min_version: int | None = None
    """Oldest policy version of its tokens; None when it has none."""


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """Proof that a group was accepted.

    Positions grow in the order of acceptance within a segment, and from segment to segment (`storage.positions`).
    """

    position: int
    group_index: int


class AcceptedGroup(msgspec.Struct, frozen=True, gc=False):
    """An accepted result."""

    position: int
    group_index: int
    ref: GroupRef
    summary: GroupSummary


class PlanRecord(msgspec.Struct, frozen=True):
    """A batch that was planned, whether trained or not."""

    batch_id: str
    positions: list[int]
    plan_ref: PoolRef


class ClosedSegment(msgspec.Struct, frozen=True):
    """Counts of a closed segment: its groups are not listed one by one any more."""

    first_position: int
    num_accepted: int
    dropped: dict[str, int]
    """Reason -> groups."""


class QueueFacts(msgspec.Struct, frozen=True):
    """Where every group is. Its parts are disjoint and cover all groups that were ever submitted.

    Groups are listed by index where their segment is open, and counted where it is closed.
    """

    fresh: list[int]
    """Never leased."""
    in_flight: list[int]
    """Leased, or leased before and waiting again."""
    accepted: dict[int, int]
    """Group index -> position."""
    dropped: dict[int, str]
    """Group index -> reason."""
    closed: list[ClosedSegment]
    cursor: PromptCursor

    @property
    def num_accepted(self) -> int:
        return len(self.accepted) + sum(segment.num_accepted for segment in self.closed)

    def dropped_by_reason(self) -> Counter[str]:
        """Reason -> dropped groups, of all segments."""
        return sum((Counter(segment.dropped) for segment in self.closed), Counter(self.dropped.values()))

    @property
    def num_groups(self) -> int:
        """All groups that were ever submitted."""
        return len(self.fresh) + len(self.in_flight) + self.num_accepted + self.dropped_by_reason().total()


class MemorySnapshot(msgspec.Struct, frozen=True):
    """What a commit keeps of a queue in memory: enough to hand out again all groups that it doesn't call trained.

    With the commit's trained positions these parts cover all groups before its prompt cursor.
    """

    unfinished: list[tuple[int, int]]
    """Groups neither trained nor dropped, as (first, last) ranges of their indices."""
    dropped: dict[str, int]
    """Reason -> groups set aside for good."""

    @property
    def num_unfinished(self) -> int:
        return sum(last - first + 1 for first, last in self.unfinished)
