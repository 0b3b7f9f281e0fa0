"""Small groups and prompts, and a queue to put them into."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from storage.columns import encode_group, summary_from_header
from storage.contracts import PayloadPool, QueueOfGroups
from storage.memory_parts import PartTable
from storage.memory_pool import MemoryPool
from storage.memory_queue import MemoryQueue
from storage.pool import Pool
from storage.queue import GroupQueue
from storage.queue_types import LeasedGroup, Receipt
from storage.refs import GroupRef
from storage.step_log import StepLog
from tests.support.shared_mount import create_pool, root_at_peer
from vime.data.cursor import PromptCursor, PromptTask
from vime.utils.types import Sample


def prompts(start: int, stop: int) -> list[PromptTask]:
    return [
        PromptTask(group_index=i, first_sample_index=2 * i, epoch=0, row=i, prompt=f"question {i}", label=i)
        for i in range(start, stop)
    ]


def cursor_at(stop: int) -> PromptCursor:
    return PromptCursor(epoch=0, offset=stop, next_group_index=stop, next_sample_index=2 * stop)


def submit(queue: QueueOfGroups, start: int, stop: int) -> None:
    queue.submit_prompts(prompts(start, stop), cursor_at(stop))


def samples_of(group_index: int, num_tokens: int = 3) -> list[Sample]:
    return [
        Sample(
            group_index=group_index,
            index=2 * group_index + member,
            tokens=[1, 2, *range(10, 10 + num_tokens)],
            response_length=num_tokens,
            rollout_log_probs=[-0.5] * num_tokens,
            version_spans=[(0, 0, num_tokens)],
            reward=float(member),
            status=Sample.Status.COMPLETED,
        )
        for member in range(2)
    ]


def producers_root(root: Path) -> Path:
    """Where a producer of its own opens the pool at `root`: through the other client, where there is one."""
    return root_at_peer(root) or root


def publish(pool: PayloadPool, leased: LeasedGroup, submission_id: str = "") -> GroupRef:
    group = encode_group(samples_of(leased.group_index))
    name = submission_id or f"{leased.group_index}:{leased.attempt}"
    at_peer = root_at_peer(pool.root) if isinstance(pool, Pool) else None
    if at_peer is not None and not submission_id:
        with Pool.open(at_peer) as peer:
            return peer.publish_groups([(group, leased.lease)], submission_id=name)[0]
    return pool.publish_groups([(group, leased.lease)], submission_id=name)[0]


def finish(pool: PayloadPool, queue: QueueOfGroups, leased: LeasedGroup) -> Receipt:
    ref = publish(pool, leased)
    return queue.accept(leased.lease, ref, summary_from_header(pool.read_header(ref)))


def new_queue(
    root: Path, num_groups: int = 0, lease_seconds: float = 60, clock: Callable[[], float] = time.monotonic
) -> tuple[Pool, GroupQueue]:
    pool = create_pool(root, "run")
    queue = GroupQueue.open(pool, owner="test", lease_seconds=lease_seconds, clock=clock)
    if num_groups:
        submit(queue, 0, num_groups)
    return pool, queue


def new_memory_queue(
    root: Path, num_groups: int = 0, lease_seconds: float = 60, clock: Callable[[], float] = time.monotonic
) -> tuple[MemoryPool, MemoryQueue]:
    root.mkdir(parents=True, exist_ok=True)
    parts: PartTable[bytes] = PartTable()
    pool = MemoryPool("run", parts)
    queue = MemoryQueue(pool, StepLog(root), lease_seconds=lease_seconds, clock=clock)
    if num_groups:
        submit(queue, 0, num_groups)
    return pool, queue


@contextmanager
def queue_of_two(root: Path) -> Iterator[tuple[Pool, Pool, GroupQueue]]:
    """The coordinator's pool, a producer's, and a queue of two groups. Each publication fills a pack."""
    with (
        Pool.create(root, "run", segment_bytes=1) as pool,
        Pool.open(producers_root(root), segment_bytes=1) as producer,
        GroupQueue.open(pool, owner="test", lease_seconds=60) as queue,
    ):
        queue.begin_session("first")
        submit(queue, 0, 2)
        yield pool, producer, queue
