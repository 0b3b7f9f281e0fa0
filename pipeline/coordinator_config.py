"""What a coordinator is told of its session and branch."""

from __future__ import annotations

import msgspec

from storage.queue_types import MemorySnapshot


class KeptVersion(msgspec.Struct, frozen=True):
    """That no publication followed a batch."""

    policy_version: int
    """The version under which the next batch is planned, as the last one was."""
    num_trained: int
    """Groups that were trained when this was told; with more it says nothing."""


class CoordinatorConfig(msgspec.Struct, frozen=True):
    """What the coordinator is started with; the same after a restart of its process."""

    branch: str
    """The branch that trains; another one when the trainer goes back to a commit meanwhile."""
    trained: list[tuple[int, int]]
    """Positions trained before this branch began, as ranges."""
    groups_wanted: int
    """Groups that the branch will have trained when the run is complete."""
    max_groups: int
    """Most groups generated but not trained."""
    lease_seconds: float
    batch: int = 1
    """Groups that one rollout batch trains."""
    surplus: int = 0
    """Groups that may be generated beyond what the run needs, because a filter may reject as many."""
    max_staleness: int | None = None
    """Most versions that a token may be older than the one under which its batch is planned; None: no bound."""
    newest_only: bool = False
    """See `AdmissionRules`."""
    online_gc: bool = False
    """Whether payloads that no kept commit needs are reclaimed."""
    reserve_bytes: int = 0
    """Free space of the file system of pool or run folder below which production pauses."""
    next_group_index: int = 0
    """Cursor of the commit that a queue in memory goes on from,"""
    memory: MemorySnapshot | None = None
    """and the groups that it gives back; None at the start of a run, and for a queue on disk."""
    session: str = ""
    """Name of the session, whose producers outlive a coordinator; the first branch when empty."""
    kept: KeptVersion | None = None
