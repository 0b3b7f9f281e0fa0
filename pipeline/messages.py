"""Control messages between the processes of a run. They carry references and small columns, never payload.

Ray moves them as bytes (`encode`, `decode`), so that nothing of ours is pickled.
"""

from __future__ import annotations

import enum
from typing import TypeVar

import msgspec

from pipeline.optional_records import Unwritten
from storage.queue_types import GroupResult, Stage
from storage.refs import PoolRef

_Message = TypeVar("_Message")


def encode(message: object) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(content: bytes, kind: type[_Message]) -> _Message:
    return msgspec.msgpack.decode(content, type=kind)


class LeaseStatus(enum.Enum):
    WORK = "work"
    BACKPRESSURE = "backpressure"
    """The queue holds as many untrained groups as it may."""
    DISK_LOW = "disk_low"
    """The file system of the pool has less free space than its reserve."""
    DONE = "done"
    """Enough groups exist for every rollout that is left."""


class Work(msgspec.Struct, frozen=True, gc=False):
    """One leased group."""

    lease: bytes
    group_index: int
    prompt_ref: PoolRef
    """A prompt, or the stored group of an earlier attempt when `stage` is not fresh."""
    stage: Stage = Stage.FRESH


class LeaseReply(msgspec.Struct, frozen=True):
    status: LeaseStatus
    work: list[Work] = []


class HeldLease(msgspec.Struct, frozen=True, gc=False):
    """A lease that a producer works on."""

    lease: bytes
    version: int
    """Policy version under which it was leased."""


AcceptRequest = GroupResult


class AcceptReply(msgspec.Struct, frozen=True, gc=False):
    """`position` is None when the lease was stale; the group has been given to somebody else."""

    group_index: int
    position: int | None


class QueueCounts(msgspec.Struct, frozen=True):
    """Groups by state, for the progress view."""

    generated: int
    trained: int
    pending: int
    in_flight: int
    dropped: dict[str, int]
    fresh: int
    backpressured: bool
    notices: list[str] = []
    """What the user should know of the storage: a sentence each."""


NO_QUEUE = QueueCounts(generated=0, trained=0, pending=0, in_flight=0, dropped={}, fresh=0, backpressured=False)
"""Of a job without a queue."""


class ProducerStats(msgspec.Struct, frozen=True):
    """Totals since the producer was first admitted."""

    groups_published: int
    samples_published: int
    tokens_generated: int
    spanning_samples: int
    """Samples with tokens of more than one policy version."""
    groups_aborted: int
    groups_stale: int
    in_flight_requests: int
    idle_s: float
    """Seconds in which no request was in flight."""
    blocked_s: float
    """Seconds in which the queue was full, or finished groups waited for room in the writer."""
    wall_s: float
    failed_samples: dict[str, int] = {}
    """Reason -> failed samples of every attempt, whether the group was tried again or dropped."""
    drifted_tokens: int = 0
    """Sampled tokens that a generate function replaced; their samples were set aside."""
    cached_prompt_tokens: int = 0
    """Prompt tokens of published samples whose keys and values an engine had in its prefix cache."""
    prompt_tokens: int = 0
    """All prompt tokens of these samples' requests."""
    reward_s: float = 0.0
    """Seconds in which samples were in the reward, summed over samples."""
    generating_s: float = 0.0
    """Seconds in which samples were generated, summed over samples."""


class Takeover(msgspec.Struct, frozen=True):
    """What came of an engine that outlived a driver."""

    version: int | None
    """Of its weights, when it was taken over."""
    why_not: str
    """Why it was ended; empty without one."""


class TrainReport(msgspec.Struct, frozen=True):
    """What one rank says of one rollout batch."""

    metrics: dict[str, float]
    train_s: float
    read_s: float
    tokens: int
    samples_without_routes: list[int] = []
    """`Sample.index` of the rank's samples that lack what routing replay replays."""
    unwritten: list[Unwritten] = []
    """Of the rank's optional records."""
