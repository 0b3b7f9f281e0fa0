"""Leases of groups in flight: one for each group, the newest."""

from __future__ import annotations

from pipeline.running_leases import RunningLease, RunningLeases
from storage.lease_board import LeaseBoard
from storage.refs import Lease, lease_to_bytes


def lease(attempt: str) -> bytes:
    return lease_to_bytes(Lease("run", "queue", "prompt:0", attempt, 1, "epoch", "token", "worker"))  # type: ignore[arg-type]


def running(*held: RunningLease) -> RunningLeases:
    leases = RunningLeases(LeaseBoard(None))
    leases.begin(held)
    return leases


def test_the_end_of_an_earlier_attempt_leaves_the_one_that_runs() -> None:
    first, second = lease("first"), lease("second")
    leases = running(RunningLease(0, first, 1, "w-1"))
    leases.begin([RunningLease(0, second, 2, "w-2")])
    leases.end([first])
    leases.end_of_group(0, first)
    assert [held.lease for held in leases] == [second]
    leases.end_of_group(0, second)
    assert len(leases) == 0


def test_leases_of_a_worker_are_those_of_all_its_processes() -> None:
    leases = running(
        RunningLease(0, lease("a"), 1, "producer-1-77"),
        RunningLease(1, lease("b"), 1, "producer-1-78"),
        RunningLease(2, lease("c"), 1, "producer-11-79"),
    )
    assert leases.of_processes("producer-1") == [lease("a"), lease("b")]


def test_the_oldest_version_is_that_of_the_groups_in_flight_or_of_one_begun_now() -> None:
    leases = running(RunningLease(0, lease("a"), 3, "w-1"), RunningLease(1, lease("b"), 5, "w-1"))
    assert leases.oldest_version(4) == 3
    assert leases.oldest_version(2) == 2
