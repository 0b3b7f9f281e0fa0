"""Random schedules of everything that can happen to a group keep the facts a partition."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from queue_helpers import finish, new_queue, submit

from storage.queue import GroupQueue
from storage.queue_types import LeasedGroup, LeaseState
from vime.errors import StaleLeaseError

PICK = st.integers(0, 10**6)


class Schedules(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.pool, self.queue = new_queue(self.root / "pool")
        self.num_groups = 0
        self.held: list[LeasedGroup] = []
        self.stale: list[LeasedGroup] = []
        self.accepted: dict[int, int] = {}
        self.dropped: dict[int, str] = {}
        self.leased_before: set[int] = set()

    @rule(count=st.integers(1, 3))
    def submit(self, count: int) -> None:
        submit(self.queue, self.num_groups, self.num_groups + count)
        self.num_groups += count

    @rule(count=st.integers(1, 3))
    def lease(self, count: int) -> None:
        leased = self.queue.lease("w", count)
        self.held += leased
        self.leased_before.update(group.group_index for group in leased)

    @precondition(lambda self: self.held)
    @rule(pick=PICK)
    def accept(self, pick: int) -> None:
        group = self.held.pop(pick % len(self.held))
        receipt = finish(self.pool, self.queue, group)
        assert receipt.position == len(self.accepted)
        assert finish(self.pool, self.queue, group) == receipt
        self.accepted[group.group_index] = receipt.position

    @precondition(lambda self: self.held)
    @rule(pick=PICK)
    def drop(self, pick: int) -> None:
        group = self.held.pop(pick % len(self.held))
        self.queue.drop(group.lease, "filtered")
        self.dropped[group.group_index] = "filtered"

    @precondition(lambda self: self.held)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        group = self.held.pop(pick % len(self.held))
        assert self.queue.release([group.lease], "aborted") == [True]
        self.stale.append(group)

    @precondition(lambda self: self.stale)
    @rule(pick=PICK)
    def a_stale_attempt_returns(self, pick: int) -> None:
        group = self.stale[pick % len(self.stale)]
        assert self.queue.heartbeat([group.lease]) == [LeaseState.STALE]
        try:
            finish(self.pool, self.queue, group)
        except StaleLeaseError:
            return
        raise AssertionError("a stale attempt was accepted")

    @rule()
    def restart(self) -> None:
        self.queue.close()
        self.queue = GroupQueue.open(self.pool, owner="again", lease_seconds=60)
        self.stale += self.held
        self.held = []

    @invariant()
    def facts_are_a_partition(self) -> None:
        facts = self.queue.facts()
        parts = [*facts.fresh, *facts.in_flight, *facts.accepted, *facts.dropped]
        assert sorted(parts) == list(range(self.num_groups)) == list(range(facts.cursor.next_group_index))
        assert facts.accepted == self.accepted
        assert facts.dropped == self.dropped
        assert set(facts.in_flight) == self.leased_before - self.accepted.keys() - self.dropped.keys()

    def teardown(self) -> None:
        self.queue.close()
        self.pool.close()
        shutil.rmtree(self.root)


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=5, stateful_step_count=12, deadline=None)
