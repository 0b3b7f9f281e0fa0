"""The durable queue of groups: the only owner of straw's coordinator."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from hashlib import sha256
from types import TracebackType

from storage.columns import summary_from_header
from storage.coordinator import CoordinatorSession
from storage.facts import TASK_PREFIX, group_of, sort_out
from storage.pool import Pool
from storage.positions import PositionRanges, first_position, segment_of
from storage.queue_types import AcceptedGroup, ClosedSegment, LeasedGroup, LeaseState, PlanRecord, QueueFacts, Receipt
from storage.refs import (
    GroupRef,
    Lease,
    PoolRef,
    from_straw_ref,
    lease_from_bytes,
    lease_to_bytes,
    to_straw_lease,
    to_straw_ref,
)
from storage.segment_list import SegmentList
from storage.step_log import StepLog, TrainedRecord
from storage.submission import submit
from storage.summary import GroupSummary
from vime.data.cursor import PromptCursor, PromptTask
from vime.errors import StorageError

logger = logging.getLogger(__name__)

_LEASE_STATES = {"extended": LeaseState.EXTENDED, "LeaseExpired": LeaseState.EXPIRED, "StaleAttempt": LeaseState.STALE}


class GroupQueue:
    """Groups from prompt to acceptance, with what was planned and trained. Thread-safe; held by one process.

    The queue is a list of segments. New prompts go to the newest; `rotate` begins a new one when that is full and
    closes those whose groups have all come to an end, so that neither memory nor the time to open grows with what
    was ever done. A closed segment is opened again where a call needs it.
    """

    def __init__(self, session: CoordinatorSession, log: StepLog) -> None:
        self._session = session
        self._log = log

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

    def rotate(self, branch: str, trained: PositionRanges) -> None:
        """Leave behind what has come to an end; call it when a commit of `branch` that calls `trained` trained is on
        disk.

        Closes each segment whose groups are all dropped or in `trained`, begins a new segment when the newest is
        full, and begins a new file of the step log. A kill at any point leaves a queue with the same facts. Leases of
        open segments go on.
        """
        with self._session.changing("rotate the queue") as segments:
            self._log.rotate(branch, trained)
            segments.rotate(trained)

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
        """Up to `max_groups` groups, lowest index first; empty when none waits. Also ends expired leases."""
        leased: list[LeasedGroup] = []
        with self._session.changing(f"lease groups to {worker_id}") as segments:
            for segment in segments.opened():
                room = max_groups - len(leased)
                if room > 0:
                    assignments = segment.coordinator.acquire(worker_id, room, task_prefix=TASK_PREFIX).assignments
                    leased += [
                        LeasedGroup(
                            lease_to_bytes(item.lease),
                            group_of(item.task.task_id),
                            from_straw_ref(item.task.input_ref),
                            item.lease.generation,
                        )
                        for item in assignments
                    ]
        return leased

    def heartbeat(self, leases: Sequence[bytes]) -> list[LeaseState]:
        """Extend leases by the lease time; one state each. Nothing is written."""
        states = [LeaseState.STALE] * len(leases)  # what closed segments say: no group of theirs is in flight
        with self._session.changing("extend leases") as segments:
            for index, members in _by_segment(segments, leases).items():
                if segments.is_open(index):
                    held = [to_straw_lease(lease) for _, lease in members]
                    answers = segments.at(index).coordinator.heartbeat(held)
                    for (number, _), answer in zip(members, answers, strict=True):
                        states[number] = _LEASE_STATES[answer]
        return states

    def release(self, leases: Sequence[bytes], reason: str) -> list[bool]:
        """Give groups back unspent, with a reason for the log; for each lease whether it gave its group back.

        The same call again changes nothing and gives the same answer.
        """
        released = [False] * len(leases)
        with self._session.changing(f"release {len(leases)} groups") as segments:
            for index, members in _by_segment(segments, leases).items():
                held = [to_straw_lease(lease) for _, lease in members]
                request = sha256("".join(lease.attempt_id for _, lease in members).encode()).hexdigest()
                answers = segments.at(index).coordinator.release_tasks(held, request_id=f"release:{request}")
                for (number, _), answer in zip(members, answers, strict=True):
                    released[number] = answer == "released"
        if leases:
            logger.info("%d groups back to the queue: %s", sum(released), reason)
        return released

    def accept(self, lease: bytes, ref: GroupRef, summary: GroupSummary) -> Receipt:
        """Make a published group the result of its lease; again by the same attempt: the same receipt.

        Raises `StaleLeaseError` when the lease is no longer current, `StorageError` when the group was published
        for another lease or this attempt already has another result.
        """
        held = lease_from_bytes(lease)
        group_index = group_of(held.task_id)
        if summary.group_index != group_index:
            raise StorageError(f"The result of group {summary.group_index} came with a lease of group {group_index}.")
        with self._session.changing(f"accept group {group_index}, attempt {held.generation}") as segments:
            segment = segments.at(segments.index_of(held))
            receipt = segment.coordinator.complete_task(
                to_straw_lease(held),
                submission_id=f"result:{held.attempt_id}",
                result_ref=to_straw_ref(ref),
                result_digest=ref.digest,
            )
            position = segment.first_position + receipt.position
            segment.summaries.setdefault(position, summary)
            segment.num_accepted = max(segment.num_accepted, receipt.position + 1)
        return Receipt(position, group_index)

    def drop(self, lease: bytes, reason: str) -> None:
        """End a group without a result, for good. Raises `StaleLeaseError` when the lease is not current."""
        if not reason:
            raise StorageError("A group can't be dropped without a reason.")
        held = lease_from_bytes(lease)
        with self._session.changing(f"drop group {group_of(held.task_id)}, attempt {held.generation}") as segments:
            segments.at(segments.index_of(held)).coordinator.fail_task(
                to_straw_lease(held),
                request_id=f"drop:{held.attempt_id}",
                failure={"category": "dropped", "reason": reason},
                retryable=False,
            )

    def accepted(self, except_for: PositionRanges | None = None) -> list[AcceptedGroup]:
        """Accepted groups of the open segments by position, but for those in `except_for`.

        Summaries that this process has not seen are read from the pool.
        """
        groups = []
        with self._session.reading("read accepted groups") as segments:
            for segment in segments.opened():
                for receipt in segment.commits(segment.first_position):
                    position = segment.first_position + receipt.position
                    if except_for is not None and position in except_for:
                        continue
                    ref = from_straw_ref(receipt.result_ref)
                    if position not in segment.summaries:
                        segment.summaries[position] = summary_from_header(self._session.pool.read_header(ref))
                    groups.append(AcceptedGroup(position, group_of(receipt.task_id), ref, segment.summaries[position]))
        return groups

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

    def trained_log(self) -> list[TrainedRecord]:
        """The records of all branches since the last rotation, oldest first."""
        with self._session.reading("read the step log"):
            return list(self._log.records)

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
                start = segment.first_position
                positions = [(receipt.task_id, start + receipt.position) for receipt in segment.commits(start)]
                sort_out(segment.coordinator.tasks, positions, facts)
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


def _by_segment(segments: SegmentList, leases: Sequence[bytes]) -> dict[int, list[tuple[int, Lease]]]:
    """Segment index -> (number in `leases`, lease)."""
    members: dict[int, list[tuple[int, Lease]]] = defaultdict(list)
    for number, content in enumerate(leases):
        lease = lease_from_bytes(content)
        members[segments.index_of(lease)].append((number, lease))
    return members


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
