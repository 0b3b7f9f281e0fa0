"""What the queue hands out: plain structs that cross processes."""

from __future__ import annotations

import enum

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


class LeasedGroup(msgspec.Struct, frozen=True):
    """The right to generate one group."""

    lease: bytes
    group_index: int
    prompt_ref: PoolRef
    """Blob for `storage.prompt_codec.decode_prompt`."""
    attempt: int
    """Counts the leases of this group, from 1."""


class Receipt(msgspec.Struct, frozen=True):
    """Proof that a group was accepted; `position` is its number in the order of acceptance, from 0."""

    position: int
    group_index: int


class AcceptedGroup(msgspec.Struct, frozen=True):
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


class QueueFacts(msgspec.Struct, frozen=True):
    """Where every group is; the four parts are disjoint and cover all groups that were ever submitted."""

    fresh: list[int]
    """Never leased."""
    in_flight: list[int]
    """Leased, or leased before and waiting again."""
    accepted: dict[int, int]
    """Group index -> position."""
    dropped: dict[int, str]
    """Group index -> reason."""
    cursor: PromptCursor

    @property
    def num_groups(self) -> int:
        """All groups that were ever submitted."""
        return len(self.fresh) + len(self.in_flight) + len(self.accepted) + len(self.dropped)
