"""Random schedules of everything that can happen to a group keep the facts a partition."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from recovery.accounting import count_identity
from storage.contracts import PayloadPool, QueueOfGroups
from storage.pool import Pool
from storage.positions import PositionRanges
from storage.queue import GroupQueue
from storage.queue_types import LeasedGroup, LeaseState
from tests.storage.queue_helpers import finish, new_queue, submit
from vime.errors import StaleLeaseError

PICK = st.integers(0, 10**6)


class Schedules(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.pool, self.queue = self.open_queue(self.root / "pool")
        self.num_groups = 0
        self.held: list[LeasedGroup] = []
        self.stale: list[LeasedGroup] = []
        self.accepted: dict[int, int] = {}
        self.dropped: dict[int, str] = {}
        self.leased_before: set[int] = set()
        self.trained: list[int] = []
        """Positions in the order of training."""
        self.sizes = mock.patch.multiple("storage.segment_list", MAX_SEGMENT_GROUPS=2)
        self.sizes.start()

    def open_queue(self, root: Path) -> tuple[PayloadPool, QueueOfGroups]:
        return new_queue(root)

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
        assert receipt.position not in self.accepted.values()
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

    @precondition(lambda self: len(self.trained) < len(self.accepted))
    @rule(pick=PICK)
    def train(self, pick: int) -> None:
        waiting = sorted(set(self.accepted.values()) - set(self.trained))
        self.trained.append(waiting[pick % len(waiting)])

    @rule()
    def commit(self) -> None:
        self.queue.rotate("main", PositionRanges.of(self.trained))

    @rule(pick=PICK)
    def restart_from_a_commit(self, pick: int) -> None:
        """Any earlier state of training may be what a resume goes back to."""
        self.queue.close()
        assert isinstance(self.pool, Pool)
        self.queue = GroupQueue.open(self.pool, owner="again", lease_seconds=60)
        self.stale += self.held
        self.held = []
        del self.trained[pick % (len(self.trained) + 1) :]
        self.queue.reopen(PositionRanges.of(self.trained))

    @invariant()
    def facts_are_a_partition(self) -> None:
        facts = self.queue.facts()
        parts = [*facts.fresh, *facts.in_flight, *facts.accepted, *facts.dropped]
        assert len(parts) == len(set(parts))
        assert self.num_groups == facts.num_groups == facts.cursor.next_group_index
        assert facts.accepted.items() <= self.accepted.items()
        assert facts.num_accepted == len(self.accepted)
        assert facts.dropped.items() <= self.dropped.items()
        assert facts.dropped_by_reason() == Counter(self.dropped.values())
        assert set(facts.in_flight) == self.leased_before - self.accepted.keys() - self.dropped.keys()
        assert count_identity(facts, PositionRanges.of(self.trained)).holds

    @invariant()
    def every_untrained_group_is_at_hand(self) -> None:
        waiting = self.queue.accepted(except_for=PositionRanges.of(self.trained))
        expected = {index: p for index, p in self.accepted.items() if p not in self.trained}
        assert {group.group_index: group.position for group in waiting} == expected

    def teardown(self) -> None:
        self.sizes.stop()
        self.queue.close()
        self.pool.close()
        shutil.rmtree(self.root)


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=8, stateful_step_count=20, deadline=None)
