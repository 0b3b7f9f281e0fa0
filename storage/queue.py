"""The durable queue of groups: the only owner of straw's coordinator."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from types import TracebackType

import straw

from storage.columns import summary_from_header
from storage.coordinator import CoordinatorSession
from storage.facts import sort_out
from storage.pool import Pool
from storage.queue_types import AcceptedGroup, LeasedGroup, LeaseState, PlanRecord, QueueFacts, Receipt
from storage.refs import (
    GroupRef,
    PoolRef,
    from_straw_ref,
    lease_from_bytes,
    lease_to_bytes,
    to_straw_lease,
    to_straw_ref,
)
from storage.submission import TASK_PREFIX, committed_cursor, group_of, submit
from storage.summary import GroupSummary
from storage.trained_log import TrainedLog, TrainedRecord, check_positions
from vime.data.cursor import PromptCursor, PromptTask
from vime.errors import StorageError

logger = logging.getLogger(__name__)

_CONSUMER = "training"
_LEASE_STATES = {"extended": LeaseState.EXTENDED, "LeaseExpired": LeaseState.EXPIRED, "StaleAttempt": LeaseState.STALE}


class GroupQueue:
    """Groups from prompt to acceptance, with what was planned and trained. Thread-safe; held by one process."""

    def __init__(self, session: CoordinatorSession, log: TrainedLog) -> None:
        self._session = session
        self._log = log
        self._token: str | None = None
        self._summaries: dict[int, GroupSummary] = {}
        self._num_accepted = len(session.commits())

    @classmethod
    def open(
        cls, pool: Pool, *, owner: str, lease_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> GroupQueue:
        """Create the queue of the pool, or recover it after a crash.

        Leases of an earlier coordinator are stale; their groups wait again. `lease_seconds` may differ from
        open to open; `clock` gives seconds and never goes back. Raises `CoordinatorBusyError` naming the present
        holder, or `StorageError`.
        """
        session = CoordinatorSession(pool, owner=owner, lease_seconds=lease_seconds, clock=clock)
        try:
            return cls(session, TrainedLog(pool.control_dir / "trained.jsonl"))
        except StorageError:
            session.close()
            raise

    @property
    def epoch(self) -> int:
        """Number of this coordinator; grows with every open."""
        return self._session.lock.epoch

    @property
    def num_accepted(self) -> int:
        """Number of accepted groups; positions are 0 up to this number."""
        return self._num_accepted

    def submit_prompts(self, prompts: Sequence[PromptTask], cursor: PromptCursor) -> None:
        """Add groups and move the cursor in one transaction; the same call again changes nothing.

        `prompts` continue at the committed cursor and end at `cursor`. Raises `StorageError` when they would skip
        or repeat a group, or differ from what was submitted under the same indices.
        """
        submit(self._session, prompts, cursor)

    def cursor(self) -> PromptCursor:
        """The cursor that was committed with the newest prompts; the start when there are none."""
        with self._session.reading("read the cursor") as coordinator:
            return committed_cursor(coordinator) or PromptCursor()

    def lease(self, worker_id: str, max_groups: int) -> list[LeasedGroup]:
        """Up to `max_groups` groups, lowest index first; empty when none waits. Also ends expired leases."""
        with self._session.changing(f"lease groups to {worker_id}") as coordinator:
            assignments = coordinator.acquire(worker_id, max_groups, task_prefix=TASK_PREFIX).assignments
        return [
            LeasedGroup(
                lease_to_bytes(item.lease),
                group_of(item.task.task_id),
                from_straw_ref(item.task.input_ref),
                item.lease.generation,
            )
            for item in assignments
        ]

    def heartbeat(self, leases: Sequence[bytes]) -> list[LeaseState]:
        """Extend leases by the lease time; one state each. Nothing is written."""
        held = [to_straw_lease(lease_from_bytes(lease)) for lease in leases]
        with self._session.changing("extend leases") as coordinator:
            return [_LEASE_STATES[state] for state in coordinator.heartbeat(held)] if held else []

    def release(self, leases: Sequence[bytes], reason: str) -> list[bool]:
        """Give groups back unspent, with a reason for the log; for each lease whether it gave its group back.

        The same call again changes nothing and gives the same answer.
        """
        parsed = [lease_from_bytes(lease) for lease in leases]
        if not parsed:
            return []
        held = [to_straw_lease(lease) for lease in parsed]
        request = sha256("".join(lease.attempt_id for lease in parsed).encode()).hexdigest()
        with self._session.changing(f"release {len(parsed)} groups") as coordinator:
            released = [
                state == "released" for state in coordinator.release_tasks(held, request_id=f"release:{request}")
            ]
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
        with self._session.changing(f"accept group {group_index}, attempt {held.generation}") as coordinator:
            receipt = coordinator.complete_task(
                to_straw_lease(held),
                submission_id=f"result:{held.attempt_id}",
                result_ref=to_straw_ref(ref),
                result_digest=ref.digest,
            )
            self._summaries.setdefault(receipt.position, summary)
            self._num_accepted = max(self._num_accepted, receipt.position + 1)
        return Receipt(receipt.position, group_index)

    def drop(self, lease: bytes, reason: str) -> None:
        """End a group without a result, for good. Raises `StaleLeaseError` when the lease is not current."""
        if not reason:
            raise StorageError("A group can't be dropped without a reason.")
        held = lease_from_bytes(lease)
        with self._session.changing(f"drop group {group_of(held.task_id)}, attempt {held.generation}") as coordinator:
            coordinator.fail_task(
                to_straw_lease(held),
                request_id=f"drop:{held.attempt_id}",
                failure={"category": "dropped", "reason": reason},
                retryable=False,
            )

    def accepted(self, from_position: int = 0) -> list[AcceptedGroup]:
        """Accepted groups in order; summaries that this process has not seen are read from the pool."""
        groups = []
        for receipt in self._session.commits(from_position):
            ref = from_straw_ref(receipt.result_ref)
            if receipt.position not in self._summaries:
                self._summaries[receipt.position] = summary_from_header(self._session.pool.read_header(ref))
            summary = self._summaries[receipt.position]
            groups.append(AcceptedGroup(receipt.position, group_of(receipt.task_id), ref, summary))
        return groups

    def record_plan(self, batch_id: str, positions: Sequence[int], plan_ref: PoolRef) -> PlanRecord:
        """Make a batch's plan durable before it is trained; the same plan again changes nothing.

        Batch ids carry branch and step: plans of several branches may hold the same positions. Raises
        `StorageError` for a position that is not accepted or another plan under the same id.
        """
        with self._session.changing(f"record plan {batch_id}") as coordinator:
            check_positions(positions, self._num_accepted, f"plan {batch_id}")
            if self._token is None:
                self._token = coordinator.open_consumer(_CONSUMER, exclusive_owner=self._session.owner)
            coordinator.plan_batch(
                _CONSUMER,
                token=self._token,
                batch_id=batch_id,
                input_positions=list(positions),
                plan_ref=to_straw_ref(plan_ref),
            )
        return PlanRecord(batch_id, list(positions), plan_ref)

    def plan(self, batch_id: str) -> PlanRecord | None:
        """The plan of a batch, None when there is none."""
        with self._session.reading(f"read plan {batch_id}") as coordinator:
            batch = coordinator.get_batch(batch_id)
        if batch is None:
            return None
        ref = from_straw_ref(straw.RecordSetRef.from_dict(batch["plan_ref"]))
        return PlanRecord(batch_id, batch["input_positions"], ref)

    def record_trained(self, branch: str, step: int, version: int, positions: Sequence[int]) -> None:
        """Make durable that a step trained these positions; the same record again changes nothing.

        Raises `StorageError` when a position is not accepted or this branch has already trained it.
        """
        with self._session.changing(f"record step {step} of branch {branch}"):
            check_positions(positions, self._num_accepted, f"step {step} of branch {branch!r}")
            self._log.append(TrainedRecord(branch, step, version, list(positions)))

    def trained_log(self) -> list[TrainedRecord]:
        """All records of all branches, oldest first."""
        with self._session.reading("read the trained log"):
            return list(self._log.records)

    def facts(self) -> QueueFacts:
        """Where every group is now, from straw's own state (time grows with the number of groups)."""
        with self._session.reading("read the queue's facts") as coordinator:
            positions = {receipt.task_id: receipt.position for receipt in self._session.commits()}
            return sort_out(coordinator.tasks, positions, committed_cursor(coordinator) or PromptCursor())

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
