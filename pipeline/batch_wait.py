"""The trainer's wait for a batch of groups: reported, interruptible, and bounded by the stall timeout."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from pipeline.messages import ProducerStats, QueueCounts
from pipeline.stall import StallWatch, set_aside_words
from storage.queue_types import AcceptedGroup
from vime.counted import agreeing, counted
from vime.errors import SettingsError

WAIT_REPORT_S = 5.0
WAITING_BATCHES_VARIABLE = "VIME_TEST_WAITING_BATCHES"
"""For experiments only: the environment variable that makes samples old, by training a batch when so many more wait.

With it no group is begun between a step and its publication, so that where the queue holds no more than these batches
(`--rollout-queue-max-groups`) every sample is exactly so many versions old.
"""


class GroupSource(Protocol):
    """What the wait needs of the queue."""

    async def wait_for_groups(self, count: int, timeout_s: float) -> list[AcceptedGroup] | None: ...
    async def counts(self) -> QueueCounts: ...


def batches_left_waiting() -> int:
    """Batches that wait behind the one that is trained: 0 unless an experiment wants old samples.

    Raises:
        SettingsError: the experiment's variable isn't a whole number.
    """
    words = os.environ.get(WAITING_BATCHES_VARIABLE, "0")
    if not words.isdecimal():
        raise SettingsError(
            f"{WAITING_BATCHES_VARIABLE} is {words!r}, allowed: 0, 1, 2, ...",
            next_step="Unset it: it serves experiments with old samples only.",
        )
    return int(words)


def groups_to_wait_for(batch: int, rollouts_left: int) -> int:
    """Groups that must be there before a batch is planned. Raises `SettingsError`, as `batches_left_waiting`."""
    return batch * min(1 + batches_left_waiting(), rollouts_left)


async def wait_for_batch(
    queue: GroupSource,
    stats: Callable[[], Awaitable[list[ProducerStats]]],
    batch: int,
    *,
    stall_timeout_s: float | None,
    report: Callable[[str], None],
    check: Callable[[QueueCounts], None],
    stop_asked: Callable[[], bool],
    interval_s: float = WAIT_REPORT_S,
) -> Sequence[AcceptedGroup] | None:
    """All waiting groups once there are `batch`; None when the user asked to stop meanwhile.

    `stats` asks the producers. Every `interval_s`, `report` is told what the wait is for, and `check` may refuse to go
    on.

    Raises:
        StalledError: no group was accepted for `stall_timeout_s`; None where a supervisor watches the wait.
    """
    started_s = time.monotonic()
    watch = None if stall_timeout_s is None else StallWatch(stall_timeout_s, started_s)
    while (groups := await queue.wait_for_groups(batch, min(interval_s, stall_timeout_s or interval_s))) is None:
        if stop_asked():
            return None
        counts, told = await asyncio.gather(queue.counts(), stats())
        now_s = time.monotonic()
        requests = sum(stat.in_flight_requests for stat in told)
        report(
            f"The trainer has waited {now_s - started_s:.0f} s for {counted(batch, 'group')} ({counts.pending} "
            f"{agreeing(counts.pending, 'is')} there); "
            f"{counted(counts.in_flight, 'group')} with {counted(requests, 'request')} "
            f"{agreeing(counts.in_flight, 'is')} in flight, {set_aside_words(counts.dropped)}."
            + "".join(f" {notice}" for notice in counts.notices)
        )
        check(counts)
        if watch is not None:
            watch.check(counts, told, batch, now_s)
    return groups
