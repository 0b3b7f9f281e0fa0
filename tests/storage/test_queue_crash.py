"""kill -9 at I/O phases of creation, recovery, submission, publication, acceptance, delivery, rotation and reclaim."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from recovery.audit import replay_journals
from storage.columns import decode_group, encode_group
from storage.pool import Pool
from storage.positions import PositionRanges
from storage.prompt_codec import decode_prompt
from storage.queue import GroupQueue
from storage.queue_types import Stage
from storage.refs import PoolRef
from storage.summary import summarize
from tests.storage.queue_helpers import cursor_at, finish, new_queue, samples_of, submit
from vime.errors import StaleLeaseError

WORKER = Path(__file__).with_name("crash_worker.py")
Check = Callable[[Path], None]


def was_killed(scenario: str, root: Path, kill_at: int) -> bool:
    """Run the worker; True when it was killed, False when it got through before that phase."""
    command = [sys.executable, str(WORKER), scenario, str(root), str(kill_at)]
    done = subprocess.run(command, cwd=WORKER.parents[2], env={"PYTHONPATH": str(WORKER.parents[2])}, check=False)
    assert done.returncode in (0, -signal.SIGKILL)
    return done.returncode != 0


def after_create(root: Path) -> None:
    if not (root / "vime" / "pool.json").exists():
        Pool.create(root, "run").close()


def after_recover(root: Path) -> None:
    with Pool.open(root) as pool, GroupQueue.open(pool, owner="after", lease_seconds=60) as queue:
        assert queue.facts().accepted == {0: 0}
        assert queue.facts().fresh == [1, 2]


def after_submit(root: Path) -> None:
    with Pool.open(root) as pool, GroupQueue.open(pool, owner="after", lease_seconds=60) as queue:
        facts = queue.facts()
        assert facts.cursor in (cursor_at(3), cursor_at(5))
        assert facts.fresh == list(range(1, facts.cursor.next_group_index))


def after_publish(root: Path) -> None:
    with Pool.open(root) as pool, GroupQueue.open(pool, owner="after", lease_seconds=60) as queue:
        facts = queue.facts()
        assert (facts.accepted, facts.in_flight, facts.fresh) == ({0: 0}, [1], [2])


def after_accept(root: Path) -> None:
    lease, ref = (root / "lease").read_bytes(), msgspec.msgpack.decode((root / "ref").read_bytes(), type=PoolRef)
    with Pool.open(root) as pool, GroupQueue.open(pool, owner="after", lease_seconds=60) as queue:
        facts = queue.facts()
        assert facts.fresh == [2]
        if 1 in facts.accepted:
            assert facts.in_flight == []
            assert queue.accept(lease, ref, summarize(samples_of(1))).position == 1
        else:
            assert facts.in_flight == [1]
            assert not (root / "acknowledged").exists(), "an acknowledged group was lost"
            with pytest.raises(StaleLeaseError):
                queue.accept(lease, ref, summarize(samples_of(1)))


def after_rotate(root: Path) -> None:
    """Killed at any point of two rotations: the same groups are where they were, whichever segments hold them."""
    with Pool.open(root) as pool, GroupQueue.open(pool, owner="after", lease_seconds=60) as queue:
        trained, facts = queue.trained_by("main"), queue.facts()
        assert trained.ranges() in ([(0, 1)], [(0, 2)])
        assert queue.highest_trained_version() == trained.ranges()[0][1] + 6
        assert facts.num_accepted == trained.ranges()[0][1] + 1
        queue.reopen(trained)
        assert queue.facts() == facts
        queue.reopen(PositionRanges())
        assert queue.facts().accepted == {index: index for index in range(facts.num_accepted)}


def after_deliver(root: Path) -> None:
    """Both groups are given back, or accepted, together or not at all."""
    with Pool.open(root) as pool, GroupQueue.open(pool, owner="after", lease_seconds=60) as queue:
        facts = queue.facts()
        assert sorted([*facts.in_flight, *facts.accepted, *facts.fresh]) == [0, 1, 2]
        assert facts.accepted in ({0: 0}, {0: 0, 1: 1, 2: 2})
        assert not (root / "acknowledged").exists() or len(facts.accepted) == 3
        waiting = queue.lease("w", 3)
        assert len({group.stage for group in waiting}) <= 1
        queue.release([group.lease for group in waiting], "looked at")


def after_reclaim(root: Path) -> None:
    """What is reclaimed is released, on disk, and what is not released is readable."""
    with Pool.open(root) as pool, GroupQueue.open(pool, owner="after", lease_seconds=60) as queue:
        assert queue.released.ranges() in ([], [(0, 0)], [(0, 2)])
        facts, trained = queue.facts(), queue.trained_by("main")
        assert facts.num_accepted == len(trained)
        queue.reopen(trained)
        queue.collect_garbage()
        assert queue.facts() == facts
        kept = queue.accepted(except_for=queue.released)
        assert [group.position for group in kept] == [
            position for position in range(facts.num_accepted) if position not in queue.released
        ]


def check_and_drain(root: Path) -> None:
    """The identity holds, every prompt is readable, and every group is accepted exactly once in the end."""
    with Pool.open(root) as pool, GroupQueue.open(pool, owner="after", lease_seconds=60) as queue:
        facts = queue.facts()
        assert facts.num_groups == facts.cursor.next_group_index
        if facts.num_groups < 5:
            submit(queue, facts.num_groups, 5)
        while leased := queue.lease("w", 8):
            for group in leased:
                if group.stage is Stage.FRESH:
                    assert decode_prompt(pool.read_blob(group.prompt_ref)).group_index == group.group_index
                else:
                    assert (
                        pool.read_group(group.prompt_ref).header == encode_group(samples_of(group.group_index)).header
                    )
                finish(pool, queue, group)
        queue.reopen(PositionRanges())
        assert queue.facts().num_accepted == 5
        accepted = queue.accepted(except_for=queue.released)
        assert len({group.position for group in accepted}) == len(accepted) == 5 - len(queue.released)
        gone = {0: [], 1: [0], 3: [0, 1, 2]}[len(queue.released)]
        assert sorted([*gone, *(group.group_index for group in accepted)]) == [0, 1, 2, 3, 4]
        for result in accepted:
            stored = pool.read_group(result.ref)
            assert decode_group(stored.header, stored.columns) == samples_of(result.group_index)
    journals = replay_journals(root)
    assert journals.accepted_twice == []
    assert len(journals.accepted) + journals.reclaimed_accepted == 5


def run_scenario(scenario: str, root: Path, kill_at: int) -> bool:
    if scenario != "create":
        pool, queue = new_queue(root, 3)
        with pool, queue:
            finish(pool, queue, queue.lease("w", 1)[0])
    killed = was_killed(scenario, root, kill_at)
    CHECKS[scenario](root)
    check_and_drain(root)
    return killed


CHECKS: dict[str, Check] = {
    "create": after_create,
    "recover": after_recover,
    "submit": after_submit,
    "publish": after_publish,
    "accept": after_accept,
    "rotate": after_rotate,
    "deliver": after_deliver,
    "reclaim": after_reclaim,
}


@pytest.mark.parametrize(
    ("scenario", "kill_at"),
    [
        ("create", 12),
        ("recover", 20),
        ("submit", 9),
        ("publish", 6),
        ("accept", 1),
        ("accept", 9),
        ("rotate", 3),
        ("rotate", 30),
        ("deliver", 2),
        ("deliver", 7),
        ("reclaim", 5),
        ("reclaim", 14),
    ],
)
def test_a_kill_loses_nothing_that_was_acknowledged(scenario: str, kill_at: int, tmp_path: Path) -> None:
    assert run_scenario(scenario, tmp_path / "pool", kill_at)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", CHECKS)
def test_a_kill_at_every_phase_loses_nothing_that_was_acknowledged(scenario: str, tmp_path: Path) -> None:
    kill_at = 0
    while run_scenario(scenario, tmp_path / str(kill_at), kill_at):
        kill_at += 1
    assert kill_at > 9
