"""The queue of groups in memory: the contract of `GroupQueue` but for its promise to outlive its process."""

from __future__ import annotations

import heapq
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256

from storage.facts import group_of
from storage.memory_group import MemoryGroup
from storage.memory_pool import MemoryPool, attempt_of
from storage.memory_table import GroupTable
from storage.positions import PositionRanges
from storage.prompt_codec import encode_prompt
from storage.queue_types import (
    AcceptedGroup,
    GroupResult,
    GroupReturn,
    LeasedGroup,
    LeaseState,
    MemorySnapshot,
    PlanRecord,
    QueueFacts,
    Receipt,
    Stage,
)
from storage.refs import GroupRef, Lease, PoolRef, lease_from_bytes
from storage.step_log import StepLog, TrainedRecord
from storage.summary import GroupSummary
from vime.data.cursor import PromptCursor, PromptTask
from vime.errors import StaleLeaseError, StorageError

logger = logging.getLogger(__name__)


class MemoryQueue:
    """Groups in memory, with a step log on disk. Thread-safe; its methods are those of `GroupQueue`.

    What it forgets when its process ends is what `snapshot` says; `restore` hands that out again. A payload is
    released when its group is trained, when its result is refused, or, at the next rotation, when it is dropped.
    """

    def __init__(
        self, pool: MemoryPool, log: StepLog, *, lease_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool, self._log = pool, log
        self._lease_seconds, self._clock = lease_seconds, clock
        self._mutex = threading.RLock()
        self._closed = False
        self._queue_id = f"memory-{uuid.uuid4().hex}"
        self._table = GroupTable()
        self._num_returns = 0
        self._plans: dict[str, PlanRecord] = {}

    def restore(
        self,
        snapshot: MemorySnapshot,
        trained: PositionRanges,
        prompts: Sequence[PromptTask],
        cursor: PromptCursor,
    ) -> None:
        """Begin where a commit stood: `trained` stays trained, and `prompts`, those of its unfinished groups, wait.

        `cursor` is the commit's. Raises `CorruptDataError` when the parts don't cover all groups before it.
        """
        with self._guarded("restore the queue"):
            self._table.restore(snapshot, trained, [task.group_index for task in prompts], cursor)
            self._add(prompts, [encode_prompt(task) for task in prompts])

    @property
    def epoch(self) -> int:
        """0: the queue has no second coordinator, since it ends with its process."""
        return 0

    @property
    def num_accepted(self) -> int:
        """Number of groups that were ever accepted."""
        with self._guarded("count accepted groups"):
            return self._table.num_accepted

    def reopen(self, trained: PositionRanges) -> None:
        """Check that every position in `trained` is accepted. Raises `CorruptDataError`."""
        with self._guarded("check trained positions"):
            self._table.check_trained(trained)

    @property
    def released(self) -> PositionRanges:
        """None: a group whose payload is gone is trained, or a resume generates it again."""
        return PositionRanges()

    def accepted_positions(self) -> PositionRanges:
        """Positions of all groups that were ever accepted."""
        with self._guarded("read accepted positions"):
            return self._table.accepted_positions()

    def rotate(self, branch: str, trained: PositionRanges, released: PositionRanges | None = None) -> None:  # noqa: ARG002
        """Leave behind what has come to an end; see `GroupQueue.rotate`. There is no storage to reclaim."""
        with self._guarded("rotate the queue"):
            self._log.rotate(branch, trained)
            self._pool.release(self._table.leave_behind(trained))

    def submit_prompts(self, prompts: Sequence[PromptTask], cursor: PromptCursor) -> None:
        """Add groups and move the cursor; the same call again changes nothing. Raises as `GroupQueue`'s."""
        indices = [task.group_index for task in prompts]
        if not indices or indices != list(range(indices[0], cursor.next_group_index)):
            raise StorageError(f"Prompts must be groups in order up to {cursor.next_group_index - 1}, found {indices}.")
        payloads = [encode_prompt(task) for task in prompts]
        with self._guarded(f"submit groups {indices[0]}..{indices[-1]}"):
            if self._table.is_new(indices, list(map(_digest, payloads)), cursor):
                self._add(prompts, payloads)
                self._table.cursor = cursor

    def cursor(self) -> PromptCursor:
        """The cursor that came with the newest prompts; the start when there are none."""
        with self._guarded("read the cursor"):
            return self._table.cursor

    def lease(self, worker_id: str, max_groups: int) -> list[LeasedGroup]:
        """Up to `max_groups` waiting groups, in the order of `GroupQueue.lease`; ends expired leases."""
        with self._guarded(f"lease groups to {worker_id}"):
            now_s = self._clock()
            waiting = (group for group in self._table.groups.values() if group.is_waiting(now_s))
            chosen = heapq.nsmallest(max_groups, waiting, key=lambda group: group.priority)
            deadline_s = now_s + self._lease_seconds
            return [group.lease(self._pool.run_id, self._queue_id, worker_id, deadline_s) for group in chosen]

    def take_over(self, worker_id: str, leases: Sequence[bytes]) -> list[bytes | None]:  # noqa: ARG002
        """See `GroupQueue.take_over`; leases of another coordinator are unknown here."""
        states = self.heartbeat(leases)
        return [lease if state is LeaseState.EXTENDED else None for lease, state in zip(leases, states, strict=True)]

    def heartbeat(self, leases: Sequence[bytes]) -> list[LeaseState]:
        """Extend leases by the lease time; one state each."""
        with self._guarded("extend leases"):
            now_s = self._clock()
            return [
                LeaseState.STALE
                if (group := self._group(lease)) is None
                else group.extend(lease.attempt_id, now_s, now_s + self._lease_seconds)
                for lease in map(lease_from_bytes, leases)
            ]

    def sweep(self) -> list[bytes]:
        """End the leases that have expired, so that their groups wait again; those leases."""
        with self._guarded("end expired leases"):
            now_s = self._clock()
            ended = (group.end_expired(now_s) for group in self._table.groups.values())
            return [lease for lease in ended if lease is not None]

    def release(self, leases: Sequence[bytes], reason: str) -> list[bool]:
        """Give groups back unspent; for each lease whether it gave its group back, now or before."""
        with self._guarded(f"release {len(leases)} groups"):
            released = [
                (group := self._group(lease)) is not None and group.give_back(lease.attempt_id)
                for lease in map(lease_from_bytes, leases)
            ]
        if leases:
            logger.info("%d groups back to the queue: %s", sum(released), reason)
        return released

    def yield_groups(self, returns: Sequence[GroupReturn]) -> list[bool]:
        """Give groups back with what they have; for each whether it went back, now or before. Refused ones are
        released."""
        if any(item.stage is Stage.FRESH for item in returns):
            raise StorageError("A group goes back with samples as partial or completed, found fresh.")
        with self._guarded(f"give back {len(returns)} groups"):
            return [self._yield_group(item, lease_from_bytes(item.lease)) for item in returns]

    def accept_many(self, results: Sequence[GroupResult]) -> list[Receipt | None]:
        """`accept` for many groups; None where the lease was stale."""
        receipts: list[Receipt | None] = []
        for result in results:
            try:
                receipts.append(self.accept(result.lease, result.ref, result.summary))
            except StaleLeaseError:
                receipts.append(None)
        return receipts

    def accept(self, lease: bytes, ref: GroupRef, summary: GroupSummary) -> Receipt:
        """Make a published group the result of its lease; raises as `GroupQueue.accept`. A refused one is released."""
        held = lease_from_bytes(lease)
        index = group_of(held.task_id)
        what = f"accept group {index}, attempt {held.generation}"
        if summary.group_index != index:
            raise StorageError(f"The result of group {summary.group_index} came with a lease of group {index}.")
        with self._guarded(what):
            group = self._table.groups.get(index)
            started_from_it = group is not None and ref == group.input_ref
            if attempt_of(ref) != held.attempt_id and not started_from_it:
                raise StorageError(f"{what}: the publication {ref.path} does not belong to task {held.task_id!r}.")
            if group is not None and group.accepted is not None and group.ended_by(held.attempt_id):
                if group.accepted.ref.digest != ref.digest:
                    raise StorageError(f"{what}: this attempt has another result already.")
                return Receipt(group.accepted.position, index)
            try:
                current = self._current(held, what)
            except StaleLeaseError:
                if not started_from_it:
                    self._pool.release([ref])
                raise
            return Receipt(self._table.accept(current, held.attempt_id, ref, summary), index)

    def drop(self, lease: bytes, reason: str) -> None:
        """End a group without a result, for good. Raises `StaleLeaseError` when the lease is not current."""
        if not reason:
            raise StorageError("A group can't be dropped without a reason.")
        held = lease_from_bytes(lease)
        index = group_of(held.task_id)
        with self._guarded(f"drop group {index}"):
            group = self._table.groups.get(index)
            if group is None or group.dropped is None or not group.ended_by(held.attempt_id):
                self._current(held, f"drop group {index}, attempt {held.generation}").end(
                    held.attempt_id, dropped=reason
                )

    def accepted(self, except_for: PositionRanges | None = None) -> list[AcceptedGroup]:
        """Accepted groups that are still kept, by position, but for those in `except_for`."""
        with self._guarded("read accepted groups"):
            return self._table.accepted(except_for or PositionRanges())

    def record_plan(self, batch_id: str, positions: Sequence[int], plan_ref: PoolRef) -> PlanRecord:
        """Log a batch's plan before it is trained; raises as `GroupQueue.record_plan`."""
        with self._guarded(f"record plan {batch_id}"):
            self._table.check_accepted(positions, f"plan {batch_id}")
            plan = PlanRecord(batch_id, list(positions), plan_ref)
            self._log.append_plan(plan)
            self._plans[batch_id] = plan
            return plan

    def plan(self, batch_id: str) -> PlanRecord | None:
        """The plan of a batch that is not trained yet, None when there is none."""
        with self._guarded(f"read plan {batch_id}"):
            return self._plans.get(batch_id)

    def record_trained(self, branch: str, step: int, version: int, positions: Sequence[int]) -> None:
        """Make durable that a step trained these positions, and release their payloads; raises as `GroupQueue`'s."""
        with self._guarded(f"record step {step} of branch {branch}"):
            self._table.check_accepted(positions, f"step {step} of branch {branch!r}")
            self._log.append(TrainedRecord(branch, step, version, list(positions)))
            self._pool.release(self._table.refs_at(positions))
            for plan in [plan for plan in self._plans.values() if set(plan.positions) <= set(positions)]:
                self._pool.release([self._plans.pop(plan.batch_id).plan_ref])

    def trained_by(self, branch: str) -> PositionRanges:
        """What a branch has trained by its records; after its first rotation, with what its ancestors had."""
        with self._guarded("read the step log"):
            return self._log.trained_by(branch)

    def highest_trained_version(self) -> int:
        """Newest policy version under which any branch has trained; 0 when none has."""
        with self._guarded("read the step log"):
            return self._log.highest_version

    def facts(self) -> QueueFacts:
        """Where every group is now; see `GroupTable.facts`."""
        with self._guarded("read the queue's facts"):
            return self._table.facts()

    def snapshot(self, trained: PositionRanges) -> MemorySnapshot:
        """What a commit that calls `trained` trained must keep of the queue."""
        with self._guarded("take a snapshot"):
            return self._table.snapshot(trained)

    def close(self) -> None:
        """Forget all groups."""
        with self._mutex:
            self._closed = True
            self._table = GroupTable()
            self._log.close()

    def __enter__(self) -> MemoryQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        with self._mutex:
            if self._closed:
                raise StorageError(f"{what}: the queue in memory is closed.", next_step="Resume from a commit.")
            yield

    def _yield_group(self, item: GroupReturn, held: Lease) -> bool:
        group = self._group(held)
        if group is not None and group.was_returned_by(held.attempt_id):
            return True
        try:
            current = self._current(held, f"give back group {group_of(held.task_id)}")
        except StaleLeaseError:
            self._pool.release([item.ref])
            return False
        self._num_returns += 1
        current.return_samples(held.attempt_id, item, self._num_returns)
        return True

    def _add(self, prompts: Sequence[PromptTask], payloads: Sequence[bytes]) -> None:
        if not prompts:
            return
        refs = self._pool.publish_prompts(payloads, submission_id=f"prompts:{prompts[0].group_index}")
        for task, payload, ref in zip(prompts, payloads, refs, strict=True):
            index = task.group_index
            self._table.groups[index] = MemoryGroup(index, ref, _digest(payload))

    def _group(self, lease: Lease) -> MemoryGroup | None:
        """The group of a lease; None when it has been left behind."""
        return self._table.groups.get(group_of(lease.task_id))

    def _current(self, lease: Lease, what: str) -> MemoryGroup:
        """The group of a lease that may end it now. Raises `StaleLeaseError`."""
        group = self._group(lease)
        if group is None:
            raise StaleLeaseError(f"{what}: the group came to its end before.", next_step="Discard the result.")
        group.check_current(lease.attempt_id, self._clock(), what)
        return group


def _digest(payload: bytes) -> str:
    return sha256(payload).hexdigest()
