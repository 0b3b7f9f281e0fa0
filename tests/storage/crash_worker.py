"""The process that dies: `python crash_worker.py SCENARIO ROOT KILL_AT` kills itself at that I/O phase of a change."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from unittest import mock

import msgspec

from storage import segment_list, step_log
from storage.pool import Pool
from storage.positions import PositionRanges
from storage.queue import GroupQueue
from storage.queue_types import GroupResult, GroupReturn, Stage
from storage.summary import summarize
from tests.storage.queue_helpers import finish, publish, samples_of, submit
from tests.support.shared_mount import create_pool


class Bomb:
    """Fault hook: counts I/O phases once armed and kills the process with SIGKILL at the given one.

    Phases are those that straw names, and every sync, replacement and removal of a file of our own.
    """

    def __init__(self, kill_at: int) -> None:
        self.kill_at = kill_at
        self.armed = False
        self.num_phases = 0

    def __call__(self, _phase: str) -> None:
        if self.armed:
            if self.num_phases == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.num_phases += 1


def watch_own_files(bomb: Bomb) -> None:
    """Make the syncs and replacements of small files phases too, for the rest of the process."""
    sync, replace, unlink, rmtree = os.fsync, Path.replace, Path.unlink, shutil.rmtree

    def watched_sync(descriptor: int) -> None:
        bomb("before sync")
        sync(descriptor)
        bomb("after sync")

    def watched_replace(self: Path, target: Path) -> Path:
        bomb("before replace")
        return replace(self, target)

    def watched_unlink(self: Path, missing_ok: bool = False) -> None:
        bomb("before unlink")
        unlink(self, missing_ok)

    def watched_rmtree(path: Path, ignore_errors: bool = False) -> None:
        bomb("before removal")
        rmtree(path, ignore_errors)

    mock.patch("os.fsync", watched_sync).start()
    mock.patch("pathlib.Path.replace", watched_replace).start()
    mock.patch("pathlib.Path.unlink", watched_unlink).start()
    mock.patch("shutil.rmtree", watched_rmtree).start()


def give_back_and_accept(pool: Pool, queue: GroupQueue, bomb: Bomb) -> None:
    """Give two groups back with their samples, lease them again, and accept both together."""
    first = queue.lease("w", 2)
    returns = [GroupReturn(group.lease, publish(pool, group), Stage.PARTIAL, 1) for group in first]
    bomb.armed = True
    queue.yield_groups(returns)
    again = queue.lease("w", 2)
    bomb.armed = False
    results = [
        GroupResult(group.lease, publish(pool, group), summarize(samples_of(group.group_index))) for group in again
    ]
    bomb.armed = True
    queue.accept_many(results)
    (pool.root / "acknowledged").touch()


def reclaim(pool: Pool, queue: GroupQueue, bomb: Bomb) -> None:
    """Commit and reclaim what group 0 and then the others of the first segment left, with a pack for each."""
    queue.begin_session("victim")
    one, two = queue.lease("w", 2)
    finish(pool, queue, one)
    queue.record_trained("main", 0, 7, [0, 1])
    bomb.armed = True
    queue.rotate("main", PositionRanges([(0, 1)]), PositionRanges([(0, 0)]))
    queue.collect_garbage()
    bomb.armed = False
    submit(queue, 3, 5)
    finish(pool, queue, two)
    queue.record_trained("main", 1, 8, [2])
    bomb.armed = True
    queue.rotate("main", PositionRanges([(0, 2)]), PositionRanges([(0, 2)]))
    queue.collect_garbage()


def rotate_twice(pool: Pool, queue: GroupQueue, bomb: Bomb) -> None:
    """Begin a second segment while a group of the first is leased, then close the first."""
    one, two = queue.lease("w", 2)
    finish(pool, queue, one)
    queue.record_trained("main", 0, 7, [0, 1])
    bomb.armed = True
    queue.rotate("main", PositionRanges([(0, 1)]))
    bomb.armed = False
    submit(queue, 3, 5)
    finish(pool, queue, two)
    queue.record_trained("main", 1, 8, [2])
    bomb.armed = True
    queue.rotate("main", PositionRanges([(0, 2)]))


def main(scenario: str, root: Path, bomb: Bomb) -> None:
    bomb.armed = scenario == "create"
    pool = (
        create_pool(root, "run", fault=bomb)
        if scenario == "create"
        else Pool.open(root, fault=bomb, segment_bytes=1 if scenario == "reclaim" else None)
    )
    bomb.armed = scenario in ("create", "recover")
    queue = GroupQueue.open(pool, owner="victim", lease_seconds=60)
    if scenario in ("create", "recover"):
        return
    if scenario == "submit":
        bomb.armed = True
        submit(queue, 3, 5)
        return
    longer = {"rotate": rotate_twice, "deliver": give_back_and_accept, "reclaim": reclaim}
    if scenario in longer:
        longer[scenario](pool, queue, bomb)
        return
    leased = queue.lease("w", 1)[0]
    bomb.armed = scenario == "publish"
    ref = publish(pool, leased)
    (root / "lease").write_bytes(leased.lease)
    (root / "ref").write_bytes(msgspec.msgpack.encode(ref))
    bomb.armed = True
    if scenario == "accept":
        queue.accept(leased.lease, ref, summarize(samples_of(1)))
        (root / "acknowledged").touch()


if __name__ == "__main__":
    segment_list.MAX_SEGMENT_GROUPS, step_log.MAX_LOG_BYTES = 2, 0
    the_bomb = Bomb(int(sys.argv[3]))
    watch_own_files(the_bomb)
    main(sys.argv[1], Path(sys.argv[2]), the_bomb)
