"""The durable queue of groups: the only owner of straw's coordinator."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from storage import acceptance, leasing
from storage.coordinator import CoordinatorSession
from storage.facts import group_of, sort_out
from storage.pool import Pool
from storage.positions import PositionRanges, first_position, segment_of
from storage.queue_types import (
    AcceptedGroup,
    ClosedSegment,
    GroupResult,
    GroupReturn,
    LeasedGroup,
    LeaseState,
    PlanRecord,
    QueueFacts,
    Receipt,
)
from storage.reclaim import Reclaimed, Reclaimer
from storage.refs import GroupRef, PoolRef, lease_fields, lease_from_bytes
from storage.retention import Retention
from storage.segment_list import SegmentList
from storage.step_log import StepLog, TrainedRecord
from storage.submission import submit
from storage.summary import GroupSummary
from vime.data.cursor import PromptCursor, PromptTask
from vime.errors import StaleLeaseError, StorageError

logger = logging.getLogger(__name__)


class GroupQueue:
    """Groups from prompt to acceptance, with what was planned and trained. Thread-safe; held by one process.

    The queue is a list of segments. New prompts go to the newest; `rotate` begins a new one when that is full and
    closes those whose groups have all come to an end, so that neither memory nor the time to open grows with what
    was ever done. A closed segment is opened again where a call needs it.
    """

    def __init__(self, session: CoordinatorSession, log: StepLog) -> None:
        self._session = session
        self._log = log
        self._retention = Retention(session.pool.control_dir)
        self._reclaimer = Reclaimer(session.pool.root, session.pool.control_dir)

    @classmethod
    def open(
        cls, pool: Pool, *, owner: str, lease_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> GroupQueue:
        """Create the queue of the pool, or recover its open segments after a crash; see also `reopen`.

        Leases of an earlier coordinator are stale; their groups wait again. `lease_seconds` may differ from
        open to open; `clock` gives seconds and never goes back. Raises `CoordinatorBusyError` naming the present
        holder, or `StorageError`.
        """
        session = CoordinatorSession(pool, owner=owner, lease_seconds=lease_seconds, clock=clock)
        try:
            return cls(session, StepLog(pool.control_dir))
        except StorageError:
            session.close()
            raise

    @property
    def epoch(self) -> int:
        """Number of this coordinator; grows with every open."""
        return self._session.lock.epoch

    @property
    def num_accepted(self) -> int:
        """Number of groups that were ever accepted."""
        with self._session.reading("count accepted groups") as segments:
            return sum(segments.num_accepted(entry.index) for entry in segments.entries)

    def reopen(self, trained: PositionRanges) -> None:
        """Open the closed segments that hold groups outside `trained`: what a resume from an older commit needs.

        Raises `CorruptDataError` when a position of `trained` is not accepted.
        """
        with self._session.changing("open segments again") as segments:
            segments.reopen(trained)

    def begin_session(self, name: str) -> bool:
        """To be called when no other process of the run is left from before, unless `name` is that of the last call.

        What earlier processes wrote can then be reclaimed. Returns whether `name` is that of the last call.
        """
        with self._session.changing(f"begin session {name}"):
            return self._reclaimer.begin_session(name)

    @property
    def released(self) -> PositionRanges:
        """Positions whose payloads may be gone; a resume from an old commit may want some of them."""
        return self._retention.released

    def accepted_positions(self) -> PositionRanges:
        """Positions of all groups that were ever accepted."""
        with self._session.reading("read accepted positions") as segments:
            counts = {first_position(entry.index): segments.num_accepted(entry.index) for entry in segments.entries}
        return PositionRanges((first, first + count - 1) for first, count in counts.items() if count)

    def retain(self, owner: str, refs: Sequence[PoolRef]) -> None:
        """Keep payloads in the pool for `owner` (an archive, an open reader), whatever becomes of their groups.

        Replaces what the owner had; holds over restarts until `let_go`.
        """
        with self._session.changing(f"retain payloads for {owner}"):
            self._retention.retain(owner, refs)

    def let_go(self, owner: str) -> None:
        """End the claims of an owner; one that has none is no error."""
        with self._session.changing(f"let go of payloads of {owner}"):
            self._retention.let_go(owner)

    def collect_garbage(self) -> Reclaimed:
        """Delete packs and journals that nothing needs; see `storage.reclaim`. Raises `StorageError`."""
        with self._session.changing("reclaim storage") as segments:
            needed = self._retention.retained_packs()
            needed |= {plan.plan_ref.path for plan in self._log.plans.values()}
            for segment in segments.opened():
                needed |= segment.needed_packs(self._retention.released)
            return self._reclaimer.collect(segments, needed)

    def rotate(self, branch: str, trained: PositionRanges, released: PositionRanges | None = None) -> None:
        """Leave behind what has come to an end; call it when a commit of `branch` that calls `trained` trained is on
        disk.

        Closes each segment whose groups are all dropped or in `trained`, begins a new segment when the newest is
        full, and begins a new file of the step log. A kill at any point leaves a queue with the same facts. Leases of
        open segments go on.

        `released` are positions that no commit needs which is kept: their results may be reclaimed from now on, and
        segments are closed, for good, only when they hold no others. None: storage is not reclaimed.
        """
        with self._session.changing("rotate the queue") as segments:
            self._log.rotate(branch, trained)
            if released is None:
                segments.rotate(trained)
            else:
                self._retention.release(released)
                segments.rotate(self._retention.released, reclaim=True)

    def submit_prompts(self, prompts: Sequence[PromptTask], cursor: PromptCursor) -> None:
        """Add groups and move the cursor in one transaction; the same call again changes nothing.

        `prompts` continue at the committed cursor and end at `cursor`. Raises `StorageError` when they would skip
        or repeat a group, or differ from what was submitted under the same indices.
        """
        submit(self._session, prompts, cursor)

    def cursor(self) -> PromptCursor:
        """The cursor that was committed with the newest prompts; the start when there are none."""
        with self._session.reading("read the cursor") as segments:
            return segments.newest.cursor()

    def lease(self, worker_id: str, max_groups: int) -> list[LeasedGroup]:
        """Up to `max_groups` groups; empty when none waits. Also ends expired leases.

        Completed deliveries come first, then partial groups, then prompts; in a stage the oldest policy version, then
        the first one, whichever segment holds it.
        """
        with self._session.changing(f"lease groups to {worker_id}") as segments:
            return leasing.lease(segments, worker_id, max_groups)

    def take_over(self, worker_id: str, leases: Sequence[bytes]) -> list[bytes | None]:
        """New leases for those that an earlier coordinator gave to the same worker, so that its work goes on.

        A lease that holds stays as it is. None where the group has come to its end, or was leased again.
        """
        with self._session.changing(f"take over {len(leases)} leases of {worker_id}") as segments:
            return leasing.take_over(segments, worker_id, leases)

    def heartbeat(self, leases: Sequence[bytes]) -> list[LeaseState]:
        """Extend leases by the lease time; one state each. Nothing is written, unless a lease has expired."""
        with self._session.changing("extend leases") as segments:
            return leasing.heartbeat(segments, leases)

    def sweep(self) -> list[bytes]:
        """End the leases that have expired, so that their groups wait again; those leases. Call it at intervals."""
        with self._session.changing("end expired leases") as segments:
            return leasing.sweep(segments)

    def release(self, leases: Sequence[bytes], reason: str) -> list[bool]:
        """Give groups back unspent, with a reason for the log; for each lease whether it gave its group back.

        The same call again changes nothing and gives the same answer.
        """
        with self._session.changing(f"release {len(leases)} groups") as segments:
            released = leasing.release(segments, leases)
        if leases:
            logger.info("%d groups back to the queue: %s", sum(released), reason)
        return released

    def yield_groups(self, returns: Sequence[GroupReturn]) -> list[bool]:
        """Give groups back with what they have: their stored members become what the next attempt starts from.

        One transaction for all of a segment; no attempt is spent. For each lease whether its group went back: a stale
        one changes nothing, and the same call again gives the same answer.
        """
        with self._session.changing(f"give back {len(returns)} groups") as segments:
            return leasing.yield_groups(segments, returns)

    def accept(self, lease: bytes, ref: GroupRef, summary: GroupSummary) -> Receipt:
        """Make a published group the result of its lease; again by the same attempt: the same receipt.

        Raises `StaleLeaseError` when the lease is no longer current, `StorageError` when the group was published
        for another lease or this attempt already has another result.
        """
        (receipt,) = self.accept_many([GroupResult(lease, ref, summary)])
        if receipt is None:
            raise _stale("accept", lease)
        return receipt

    def accept_many(self, results: Sequence[GroupResult]) -> list[Receipt | None]:
        """`accept` for many groups, in one transaction for all of a segment; None where the lease was stale."""
        with self._session.changing(f"accept {', '.join(_names(results))}") as segments:
            return acceptance.accept(self._session, segments, results)

    def drop(self, lease: bytes, reason: str) -> None:
        """End a group without a result, for good. Raises `StaleLeaseError` when the lease is not current."""
        if not reason:
            raise StorageError("A group can't be dropped without a reason.")
        held = lease_from_bytes(lease)
        with self._session.changing(f"drop group {group_of(held.task_id)}, attempt {held.generation}") as segments:
            index = segments.index_of(held)
            if segments.is_reclaimed(index):
                raise _stale("drop", lease)
            segments.at(index).coordinator.fail_task(
                lease_fields(held),
                request_id=f"drop:{held.attempt_id}",
                failure={"category": "dropped", "reason": reason},
                retryable=False,
            )
            segments.at(index).held.pop(held.attempt_id, None)

    def accepted(self, except_for: PositionRanges | None = None) -> list[AcceptedGroup]:
        """Accepted groups of the open segments by position, but for those in `except_for`; reads their headers."""
        with self._session.reading("read accepted groups") as segments:
            return acceptance.accepted_groups(self._session.pool, segments, except_for or PositionRanges())

    def record_plan(self, batch_id: str, positions: Sequence[int], plan_ref: PoolRef) -> PlanRecord:
        """Make a batch's plan durable before it is trained; the same plan again changes nothing.

        Batch ids carry branch and step: plans of several branches may hold the same positions. Raises
        `StorageError` for a position that is not accepted or another plan under the same id.
        """
        with self._session.changing(f"record plan {batch_id}") as segments:
            _check_accepted(segments, positions, f"plan {batch_id}")
            plan = PlanRecord(batch_id, list(positions), plan_ref)
            self._log.append_plan(plan)
        return plan

    def plan(self, batch_id: str) -> PlanRecord | None:
        """The plan of a batch, None when there is none since the last rotation."""
        with self._session.reading(f"read plan {batch_id}"):
            return self._log.plans.get(batch_id)

    def record_trained(self, branch: str, step: int, version: int, positions: Sequence[int]) -> None:
        """Make durable that a step trained these positions; the same record again changes nothing.

        Raises `StorageError` when a position is not accepted or this branch has already trained it.
        """
        with self._session.changing(f"record step {step} of branch {branch}") as segments:
            _check_accepted(segments, positions, f"step {step} of branch {branch!r}")
            self._log.append(TrainedRecord(branch, step, version, list(positions)))

    def trained_by(self, branch: str) -> PositionRanges:
        """What a branch has trained by its records; after its first rotation, with what its ancestors had."""
        with self._session.reading("read the step log"):
            return self._log.trained_by(branch)

    def highest_trained_version(self) -> int:
        """Newest policy version under which any branch has trained; 0 when none has."""
        with self._session.reading("read the step log"):
            return self._log.highest_version

    def facts(self) -> QueueFacts:
        """Where every group is now, from straw's own state (time grows with the groups of open segments)."""
        with self._session.reading("read the queue's facts") as segments:
            closed = [
                ClosedSegment(first_position(entry.index), entry.summary.num_accepted, entry.summary.dropped)
                for entry in segments.closed()
                if entry.summary is not None
            ]
            facts = QueueFacts([], [], {}, {}, closed, segments.newest.cursor())
            for segment in segments.opened():
                sort_out(segment.groups(), segment.first_position, facts)
            return facts

    def snapshot(self, trained: PositionRanges) -> None:
        """None: a resume reads this queue itself."""

    def close(self) -> None:
        """Give the queue up; its leases become stale when it is opened again."""
        self._session.close()
        self._log.close()

    def __enter__(self) -> GroupQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _names(results: Sequence[GroupResult]) -> list[str]:
    """Groups and attempts, for messages; the first few of many."""
    leases = [lease_from_bytes(result.lease) for result in results[:3]]
    names = [f"group {group_of(lease.task_id)}, attempt {lease.generation}" for lease in leases]
    return names if len(results) <= len(names) else [*names, f"{len(results) - len(names)} more"]


def _stale(what: str, lease: bytes) -> StaleLeaseError:
    held = lease_from_bytes(lease)
    return StaleLeaseError(
        f"{what} group {group_of(held.task_id)}, attempt {held.generation}: the lease has expired or its group was "
        "leased again.",
        next_step="Throw this result away; the group is in the queue for another attempt.",
    )


def _check_accepted(segments: SegmentList, positions: Sequence[int], what: str) -> None:
    """Raise `StorageError` unless every position is one of the accepted groups."""
    bad = [p for p in positions if p - first_position(segment_of(p)) >= segments.num_accepted(segment_of(p))]
    if bad:
        index = segment_of(bad[0])
        start, allowed = first_position(index), segments.num_accepted(index)
        raise StorageError(
            f"{what}: positions {bad[:5]} are not accepted, allowed in segment {index}: "
            + (f"{start}..{start + allowed - 1}." if allowed else "none.")
        )
