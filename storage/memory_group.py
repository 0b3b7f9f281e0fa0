"""One group of a queue in memory: its attempts, and how it ended. Pure; times are seconds of the queue's clock."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

import msgspec

from storage.facts import TASK_PREFIX
from storage.queue_types import AcceptedGroup, GroupReturn, LeasedGroup, LeaseState, Stage
from storage.refs import Lease, PoolRef
from vime.errors import StaleLeaseError

NO_VERSION = 2**63 - 1
"""Stands for the version of a returned group that has none: it comes last in its stage."""


@dataclass
class MemoryGroup:
    """A group from its prompt to its end."""

    index: int
    input_ref: PoolRef
    """What the next attempt starts from: the prompt, or the samples of the attempt that returned the group."""
    prompt_digest: str
    stage: Stage = Stage.FRESH
    min_version: int | None = None
    return_order: int = 0
    """Counts the returns of all groups."""
    refs: list[PoolRef] = field(default_factory=list)
    """Everything that was published for it and not refused; released together."""
    attempts: int = 0
    accepted: AcceptedGroup | None = None
    dropped: str | None = None
    """Why it was set aside."""
    _lease: Lease | None = None
    _deadline_s: float = 0.0
    _ended_by: str | None = None
    """The attempt that accepted or dropped it."""
    _released: set[str] = field(default_factory=set)
    """Attempts that gave the group back as they found it,"""
    _returned: set[str] = field(default_factory=set)
    """and those that gave it back with samples."""

    def __post_init__(self) -> None:
        self.refs.append(self.input_ref)

    @property
    def priority(self) -> tuple[int, int, int]:
        """Sorts waiting groups: completed ones, partial ones, prompts; oldest version first; first in, first out."""
        if self.stage is Stage.FRESH:
            return 0, 0, self.index
        return -self.stage, NO_VERSION if self.min_version is None else self.min_version, self.return_order

    @property
    def is_finished(self) -> bool:
        return self.accepted is not None or self.dropped is not None

    def is_waiting(self, now_s: float) -> bool:
        """Whether it can be leased: nobody holds it, or the holder's time is up."""
        return not self.is_finished and (self._lease is None or now_s >= self._deadline_s)

    def lease(self, run_id: str, queue_id: str, worker_id: str, deadline_s: float) -> LeasedGroup:
        """Begin an attempt; the one before it, if any, is stale."""
        self.attempts += 1
        self._lease = Lease(
            run_id=run_id,
            queue_id=queue_id,
            task_id=f"{TASK_PREFIX}{self.index}",
            attempt_id=uuid.uuid4().hex,
            generation=self.attempts,
            coordinator_epoch="",
            token="",
            worker_id=worker_id,
        )
        self._deadline_s = deadline_s
        lease = msgspec.msgpack.encode(self._lease)
        return LeasedGroup(lease, self.index, self.input_ref, self.attempts, self.stage, self.min_version)

    def end_expired(self, now_s: float) -> bytes | None:
        """The lease, if its time is up; the group then waits, and a result of it is refused."""
        if self._lease is None or now_s < self._deadline_s:
            return None
        lease, self._lease = self._lease, None
        return msgspec.msgpack.encode(lease)

    def extend(self, attempt_id: str, now_s: float, deadline_s: float) -> LeaseState:
        """Answer a heartbeat."""
        if self.is_finished or not self._is_current(attempt_id):
            return LeaseState.STALE
        if now_s >= self._deadline_s:
            return LeaseState.EXPIRED
        self._deadline_s = deadline_s
        return LeaseState.EXTENDED

    def give_back(self, attempt_id: str) -> bool:
        """End an attempt unspent; whether it was this attempt's to give, now or at an earlier call."""
        if not self.is_finished and self._is_current(attempt_id):
            self._lease = None
            self._released.add(attempt_id)
        return attempt_id in self._released

    def return_samples(self, attempt_id: str, returned: GroupReturn, order: int) -> None:
        """End an attempt with what it has, for the next one to go on with (after `check_current`)."""
        self.input_ref, self.stage, self.min_version = returned.ref, returned.stage, returned.min_version
        self.return_order = order
        self.refs.append(returned.ref)
        self._lease = None
        self._returned.add(attempt_id)

    def was_returned_by(self, attempt_id: str) -> bool:
        """Whether this attempt gave the group back with samples."""
        return attempt_id in self._returned

    def check_current(self, attempt_id: str, now_s: float, what: str) -> None:
        """Raise `StaleLeaseError` unless this attempt may end the group now."""
        if self.is_finished or not self._is_current(attempt_id) or now_s >= self._deadline_s:
            raise StaleLeaseError(
                f"{what}: the lease has expired or its group was given to another attempt.",
                next_step="Discard the result; the group has another attempt.",
            )

    def ended_by(self, attempt_id: str) -> bool:
        """Whether this attempt accepted or dropped the group."""
        return self._ended_by == attempt_id

    def end(self, attempt_id: str, *, accepted: AcceptedGroup | None = None, dropped: str | None = None) -> None:
        """The result of the group, for good (after `check_current`)."""
        self.accepted, self.dropped = accepted, dropped
        if accepted is not None and accepted.ref not in self.refs:
            self.refs.append(accepted.ref)
        self._ended_by, self._lease = attempt_id, None

    def _is_current(self, attempt_id: str) -> bool:
        return self._lease is not None and self._lease.attempt_id == attempt_id
