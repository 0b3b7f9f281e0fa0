"""The only owner of the queue: hands out groups, accepts results, records plans, and keeps the books."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from pipeline.branch_books import BranchBooks
from pipeline.coordinator_config import CoordinatorConfig, KeptVersion
from pipeline.joint_calls import JointCalls
from pipeline.lease_room import LeaseRoom
from pipeline.messages import (
    AcceptReply,
    AcceptRequest,
    HeldLease,
    LeaseReply,
    LeaseStatus,
    QueueCounts,
    Work,
)
from pipeline.running_leases import RunningLease, RunningLeases
from pipeline.storage_care import StorageCare
from recovery.accounting import Identity
from recovery.commit import QueueState
from storage.contracts import PayloadPool, QueueOfGroups
from storage.disk_reserve import DiskReserve
from storage.facts import group_of
from storage.lease_board import LeaseBoard
from storage.pool import Pool
from storage.positions import PositionRanges
from storage.queue import GroupQueue
from storage.queue_types import AcceptedGroup, GroupReturn, LeaseState
from storage.refs import lease_from_bytes
from vime.data.prompt_stream import PromptStream
from vime.errors import StaleLeaseError
from vime.utils.kill_points import KillPoint, reach

logger = logging.getLogger(__name__)

TAKE_OVER_S = 1.5
"""How long after a restart the groups that were in flight are kept for the producers that work on them."""
HOUSEKEEPING_S = 10.0
"""Longest time between two looks for expired leases."""
REFILL_GROUPS = (8, 256)
"""Fewest and most prompts taken from the data set at a time."""
REFILL_LEASES = 4
"""A refill is for so many leases like the one that found nothing left."""


class Coordinator:
    """The queue's state and rules, in one process. Methods without `await` are atomic."""

    def __init__(
        self,
        pool: PayloadPool,
        queue: QueueOfGroups,
        source: PromptStream,
        config: CoordinatorConfig,
        storage: StorageCare,
        board: LeaseBoard | None = None,
        *,
        restarted: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`board` notes when leases began, for people who look in.

        `restarted`: producers have leases of the coordinator before, and for `TAKE_OVER_S` only they get groups.
        """
        self._pool, self._queue, self._source, self._storage = pool, queue, source, storage
        self._clock = clock
        self._hands_out_from = clock() + TAKE_OVER_S if restarted else 0.0
        self._leases = RunningLeases(board or LeaseBoard(None))
        self._accepting = JointCalls(self._accept)
        self._arrival = asyncio.Condition()
        self._backpressured = False
        self.begin_branch(config)

    def begin_branch(self, config: CoordinatorConfig) -> None:
        """Keep the books of another branch from now on: what it doesn't call trained is pending. Leases go on.

        The same again changes nothing. Raises `CorruptDataError` when `config` names positions that aren't accepted.
        """
        self._config = config
        self._books = BranchBooks(self._queue, config.branch, config.trained)
        self._room = LeaseRoom(config, self._books, self._leases, self._queue.highest_trained_version())

    @property
    def config(self) -> CoordinatorConfig:
        """What a successor must know: what this was told last."""
        return self._config

    @property
    def epoch(self) -> int:
        """Grows with every coordinator of the queue."""
        return self._queue.epoch

    def lease(self, worker_id: str, max_groups: int, policy_version: int = 0) -> LeaseReply:
        """Hand out up to `max_groups` groups, to be generated under `policy_version` or a later one."""
        self.sweep()
        if self._clock() < self._hands_out_from:
            return LeaseReply(LeaseStatus.BACKPRESSURE)
        needed = self._room.needed()
        room = min(max_groups, needed, self._room.under(policy_version))
        self._backpressured = room <= 0
        if room <= 0:
            return LeaseReply(LeaseStatus.DONE if needed <= 0 else LeaseStatus.BACKPRESSURE)
        if not self._storage.has_space():
            return LeaseReply(LeaseStatus.DISK_LOW)
        leased = self._queue.lease(worker_id, room)
        if not leased:
            self._refill(room)
            leased = self._queue.lease(worker_id, room)
        for group in leased:
            self._books.leased(group.group_index)
        self._leases.begin(
            RunningLease(
                group.group_index,
                group.lease,
                policy_version if group.min_version is None else min(policy_version, group.min_version),
                worker_id,
            )
            for group in leased
        )
        self._leases.show()
        return LeaseReply(
            LeaseStatus.WORK,
            [Work(group.lease, group.group_index, group.prompt_ref, group.stage) for group in leased],
        )

    def take_over(self, worker_id: str, held: Sequence[HeldLease]) -> list[bytes | None]:
        """Leases with which a producer goes on that worked for the coordinator before; None for groups it has lost."""
        taken = self._queue.take_over(worker_id, [item.lease for item in held])
        going_on = [
            RunningLease(group_of(lease_from_bytes(lease).task_id), lease, item.version, worker_id)
            for item, lease in zip(held, taken, strict=True)
            if lease is not None
        ]
        for running in going_on:
            self._books.leased(running.group_index)
        self._leases.begin(going_on)
        logger.warning("%s goes on with %d groups and has lost %d", worker_id, len(going_on), len(held) - len(going_on))
        return taken

    def retire(self, worker_name: str) -> None:
        """The processes of this name have ended: what they leased waits again."""
        leases = self._leases.of_processes(worker_name)
        if leases:
            self._queue.release(leases, f"{worker_name} has died")
            self._leases.end(leases)

    def heartbeat(self, leases: list[bytes]) -> list[bool]:
        """For each lease, whether it still holds; those that don't no longer count as work in progress."""
        alive = [state is LeaseState.EXTENDED for state in self._queue.heartbeat(leases)]
        self._leases.end(lease for lease, holds in zip(leases, alive, strict=True) if not holds)
        self._leases.extended(leases)
        self._leases.show()
        return alive

    def sweep(self) -> None:
        """End the leases that have expired: their groups wait again. To be called at intervals."""
        ended = self._queue.sweep()
        if ended:
            logger.warning("%d leases have expired; their groups are handed out again", len(ended))
        self._leases.end(ended)

    async def accept(self, requests: list[AcceptRequest]) -> list[AcceptReply]:
        """Accept published groups; a stale attempt is refused without harm.

        Calls that arrive while the process is busy share one transaction.
        """
        replies = await self._accepting.call(requests)
        async with self._arrival:
            self._arrival.notify_all()
        return replies

    def release(self, group_index: int, lease: bytes, reason: str) -> None:
        """Give a group back unfinished; it is handed out again."""
        self._queue.release([lease], reason)
        self._leases.end_of_group(group_index, lease)

    def yield_groups(self, returns: Sequence[GroupReturn]) -> list[bool]:
        """Give groups back with the samples that they have; for each lease whether its group went back."""
        done = self._queue.yield_groups(returns)
        self._leases.end(item.lease for item in returns)
        return done

    def drop(self, group_index: int, lease: bytes, reason: str) -> None:
        """Set a group aside for good, with its reason; a stale attempt may not, and changes nothing."""
        try:
            self._queue.drop(lease, reason)
        except StaleLeaseError as error:
            logger.warning("group %d: %s", group_index, error)
            return
        finally:
            self._leases.end_of_group(group_index, lease)
        self._books.dropped(group_index, reason)

    async def wait_for_groups(self, count: int, timeout_s: float) -> list[AcceptedGroup] | None:
        """All waiting groups once there are `count`; None when that takes longer than `timeout_s`."""
        self._leases.show()
        async with self._arrival:
            try:
                await asyncio.wait_for(self._arrival.wait_for(lambda: self._books.num_waiting >= count), timeout_s)
            except TimeoutError:
                return None
        return self._books.waiting

    def record_plan(self, batch_id: str, positions: list[int], plan: bytes) -> None:
        """Persist a batch plan; training may begin when this returns. The same plan again changes nothing."""
        known = self._queue.plan(batch_id)
        if known is not None and known.positions == positions and self._pool.read_blob(known.plan_ref) == plan:
            return  # the answer to an earlier call was lost
        self._queue.record_plan(batch_id, positions, self._pool.publish_blob(plan, submission_id=batch_id))

    def training_completed(self, rollout_id: int, policy_version: int, positions: list[int]) -> None:
        """Advance the offset: these groups are trained on this branch."""
        self._queue.record_trained(self._config.branch, rollout_id, policy_version, positions)
        self._books.completed(positions)
        self._room.trained(policy_version)

    def identity(self) -> Identity:
        return self._books.identity(self._queue.facts())

    def counts(self) -> QueueCounts:
        """The same counts as `identity`, from running books: cheap enough for every step."""
        return self._books.counts(backpressured=self._backpressured, notices=self._storage.notices())

    def highest_version(self) -> int:
        """Newest policy version that the queue has seen on any branch; 0 when there is none.

        A trained group's versions are at most that of its batch, so only the others are looked at one by one.
        """
        return self._books.newest_version(at_least=self._queue.highest_trained_version())

    def save_prompt_source(self, rollout_id: int) -> None:
        """Have the prompt source keep what the cursor doesn't say. Raises `DataError`."""
        self._source.save(rollout_id)

    def queue_state(self) -> QueueState:
        """The part of a commit that belongs to the queue; from running books, as `counts`."""
        counts = self.counts()
        return QueueState(
            trained=self._books.trained.ranges(),
            next_group_index=self._queue.cursor().next_group_index,
            identity={
                "generated": counts.generated,
                "trained": counts.trained,
                "pending": counts.pending,
                "in_flight": counts.in_flight,
                "dropped": sum(counts.dropped.values()),
            },
            memory=self._queue.snapshot(self._books.trained),
            accepted=self._queue.accepted_positions().ranges(),
        )

    def rotate(self, committed: QueueState, released: PositionRanges | None = None) -> None:
        """Leave behind what has come to an end; to be called when the commit with this state is on disk.

        With online garbage collection `released` are the positions that no commit needs which is kept.
        """
        ended = (released or PositionRanges()) if self._config.online_gc else None
        self._queue.rotate(self._config.branch, PositionRanges(committed.trained), ended)
        self._storage.collect()

    async def keep_house(self) -> None:
        """End expired leases and reclaim storage at intervals, until cancelled. Raises `StorageError`."""
        interval_s = min(max(self._config.lease_seconds / 3, 0.1), HOUSEKEEPING_S)
        while True:
            await asyncio.sleep(interval_s)
            self.sweep()
            self._storage.collect_at_intervals()

    def close(self) -> None:
        self._queue.close()
        self._pool.close()

    def _accept(self, requests: Sequence[AcceptRequest]) -> list[AcceptReply]:
        replies = []
        reach(KillPoint.BEFORE_ACCEPT)
        receipts = self._queue.accept_many(requests)
        reach(KillPoint.AFTER_ACCEPT)
        for request, receipt in zip(requests, receipts, strict=True):
            group_index = request.summary.group_index
            self._leases.end_of_group(group_index, request.lease)
            replies.append(AcceptReply(group_index, None if receipt is None else receipt.position))
            if receipt is None:
                logger.warning("group %d: a late result of an attempt that had ended was refused", group_index)
                continue
            self._books.accepted(AcceptedGroup(receipt.position, group_index, request.ref, request.summary))
        return replies

    def _refill(self, room: int) -> None:
        fewest, most = REFILL_GROUPS
        prompts, following = self._source.take(self._queue.cursor(), min(max(REFILL_LEASES * room, fewest), most))
        self._queue.submit_prompts(prompts, following)
        self._books.submitted(prompt.group_index for prompt in prompts)

    def keep_version(self, policy_version: int) -> None:
        """The batch after the last one is planned under the same version: nothing was published between them."""
        self._room.keep_version(policy_version)
        kept = KeptVersion(policy_version, len(self._books.trained))
        self._config = msgspec.structs.replace(self._config, kept=kept)


def open_coordinator(
    *,
    open_pool: Callable[[], Pool],
    source: PromptStream,
    owner: str,
    config: CoordinatorConfig,
    clock: Callable[[], float] = time.monotonic,
) -> Coordinator:
    """Open the pool and the queue under the coordinator's lock."""
    pool = open_pool()
    try:
        queue = GroupQueue.open(pool, owner=owner, lease_seconds=config.lease_seconds)
    except BaseException:
        pool.close()
        raise
    try:
        restarted = queue.begin_session(config.session or config.branch)
        collect = queue.collect_garbage if config.online_gc else None
        storage = StorageCare(DiskReserve(pool.root, config.reserve_bytes), collect)
        board = LeaseBoard(pool.control_dir)
        return Coordinator(pool, queue, source, config, storage, board, restarted=restarted, clock=clock)
    except BaseException:
        queue.close()
        pool.close()
        raise
