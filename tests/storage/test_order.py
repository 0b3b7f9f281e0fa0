"""Which group is leased next, and groups that go back with what they have."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.audit import replay_journals
from storage.facts import GroupPhase, GroupState, TaskNotes
from storage.leasing import lease_order
from storage.pool import Pool
from storage.positions import SEGMENT_SPAN, PositionRanges
from storage.queue import GroupQueue
from storage.queue_types import GroupResult, GroupReturn, LeasedGroup, LeaseState, Stage
from storage.refs import PoolRef
from storage.summary import summarize
from tests.storage.queue_helpers import finish, new_queue, publish, samples_of, submit
from vime.errors import StorageError


@pytest.fixture(autouse=True)
def tiny_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.segment_list.MAX_SEGMENT_GROUPS", 4)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[Pool, GroupQueue]]:
    """Groups 0 to 3 in one segment and 4 to 7 in the next."""
    pool, queue = new_queue(tmp_path / "pool", 4)
    with pool, queue:
        queue.rotate("main", PositionRanges())
        submit(queue, 4, 8)
        yield pool, queue


def returned(pool: Pool, leased: LeasedGroup, stage: Stage, version: int | None) -> GroupReturn:
    return GroupReturn(leased.lease, publish(pool, leased), stage, version)


def indices(leased: list[LeasedGroup]) -> list[int]:
    return [group.group_index for group in leased]


def reopened(pool: Pool, queue: GroupQueue) -> GroupQueue:
    queue.close()
    return GroupQueue.open(pool, owner="test", lease_seconds=60)


def journal_size(pool: Pool) -> int:
    return sum(path.stat().st_size for path in (pool.root / "queues").glob("*/control/journal.log"))


def num_transactions(pool: Pool) -> int:
    return sum(path.read_bytes().count(b"SLMTXN01") for path in (pool.root / "queues").glob("*/control/journal.log"))


def test_completed_comes_before_partial_before_fresh_and_old_versions_before_new_over_all_segments(
    opened: tuple[Pool, GroupQueue],
) -> None:
    pool, queue = opened
    leased = queue.lease("w", 7)
    kinds = [
        (Stage.PARTIAL, 5),
        (Stage.PARTIAL, None),
        (Stage.COMPLETED, 9),
        (Stage.PARTIAL, 3),
        (Stage.PARTIAL, 3),
        (Stage.COMPLETED, 2),
    ]
    for group, (stage, version) in zip(leased, kinds, strict=False):
        assert queue.yield_groups([returned(pool, group, stage, version)]) == [True]
    queue.release([leased[6].lease], "aborted")

    expected = [5, 2, 3, 4, 0, 1, 6, 7]
    with reopened(pool, queue) as restarted:
        again = restarted.lease("w", 8)
        assert indices(again) == expected
        assert [group.stage for group in again[:2]] == [Stage.COMPLETED] * 2
        assert [group.min_version for group in again] == [2, 9, 3, 3, 5, None, None, None]
        restarted.release([group.lease for group in again], "aborted")
        assert indices(restarted.lease("w", 8)) == expected


def test_returned_groups_of_one_version_are_first_in_first_out_whichever_segment_has_them(
    opened: tuple[Pool, GroupQueue],
) -> None:
    pool, queue = opened
    leased = queue.lease("w", 8)
    order = [6, 1, 7, 0, 3, 5]
    for index in order:
        queue.yield_groups([returned(pool, leased[index], Stage.PARTIAL, 4)])
    assert indices(queue.lease("w", 3)) == order[:3]
    with reopened(pool, queue) as restarted:
        assert indices(restarted.lease("w", 8)) == [*order, 2, 4]


@given(
    st.lists(
        st.tuples(st.sampled_from(Stage), st.none() | st.integers(0, 5), st.integers(1, 9)), unique=True, max_size=9
    )
)
def test_lease_order_is_stage_then_version_then_first_in(kinds: list[tuple[Stage, int | None, int]]) -> None:
    ref = PoolRef("", "", "", 0, "", 0, "", 0, 0, "", 0, 0)
    states = [
        GroupState(order, GroupPhase.WAITING, stage, ref, TaskNotes("", version=version, order=order))
        for stage, version, order in kinds
    ]
    ordered = sorted(states, key=lease_order)
    for earlier, later in itertools.pairwise(ordered):
        assert earlier.stage >= later.stage
        if earlier.stage is later.stage is not Stage.FRESH:
            versions = [99 if state.notes.version is None else state.notes.version for state in (earlier, later)]
            assert versions == sorted(versions)
            assert versions[0] < versions[1] or earlier.notes.order <= later.notes.order


def test_a_returned_group_starts_from_its_samples_and_its_old_attempt_has_ended(
    opened: tuple[Pool, GroupQueue],
) -> None:
    pool, queue = opened
    first = queue.lease("w", 1)[0]
    given_back = returned(pool, first, Stage.PARTIAL, 3)
    assert queue.yield_groups([given_back]) == [True]
    assert queue.yield_groups([given_back]) == [True]
    assert queue.heartbeat([first.lease]) == [LeaseState.STALE]
    assert queue.facts().in_flight == [0]

    again = queue.lease("w", 1)[0]
    assert (again.group_index, again.attempt, again.stage) == (0, 2, Stage.PARTIAL)
    assert pool.read_group(again.prompt_ref).header == pool.read_group(given_back.ref).header
    assert queue.yield_groups([given_back]) == [True]  # an answer that was lost changes nothing for the new attempt
    assert queue.heartbeat([again.lease]) == [LeaseState.EXTENDED]
    finish(pool, queue, again)


def test_a_completed_delivery_is_accepted_as_it_was_stored(opened: tuple[Pool, GroupQueue]) -> None:
    pool, queue = opened
    first = queue.lease("w", 1)[0]
    delivery = returned(pool, first, Stage.COMPLETED, 3)
    queue.yield_groups([delivery])
    again = queue.lease("w", 1)[0]
    assert queue.accept(again.lease, again.prompt_ref, summarize(samples_of(0))).position == 0
    assert queue.accepted()[0].ref == delivery.ref


def test_a_stale_attempt_gives_nothing_back_and_the_others_of_its_call_do(opened: tuple[Pool, GroupQueue]) -> None:
    pool, queue = opened
    stale, other = queue.lease("w", 2)
    result = returned(pool, stale, Stage.PARTIAL, 1)
    queue.release([stale.lease], "aborted")
    assert queue.yield_groups([result, returned(pool, other, Stage.PARTIAL, 1)]) == [False, True]
    assert [(group.group_index, group.stage) for group in queue.lease("w", 2)] == [(1, Stage.PARTIAL), (0, Stage.FRESH)]


def test_a_group_goes_back_with_samples_or_not_at_all(opened: tuple[Pool, GroupQueue]) -> None:
    pool, queue = opened
    (leased,) = queue.lease("w", 1)
    with pytest.raises(StorageError, match="as partial or completed, found fresh"):
        queue.yield_groups([returned(pool, leased, Stage.FRESH, None)])


def test_groups_that_arrive_together_are_accepted_in_one_transaction_a_segment(
    opened: tuple[Pool, GroupQueue],
) -> None:
    pool, queue = opened
    leased = queue.lease("w", 8)
    stale = leased.pop(2)
    results = [
        GroupResult(group.lease, publish(pool, group), summarize(samples_of(group.group_index)))
        for group in [*leased, stale]
    ]
    queue.release([stale.lease], "aborted")
    before = num_transactions(pool)

    receipts = queue.accept_many(results)

    assert num_transactions(pool) == before + 2
    assert receipts.pop() is None
    assert [receipt.position for receipt in receipts if receipt] == [0, 1, 2, *range(SEGMENT_SPAN, SEGMENT_SPAN + 4)]
    assert queue.accept_many(results) == [*receipts, None]
    with reopened(pool, queue) as restarted:
        assert restarted.accept_many(results) == [*receipts, None]
        assert [group.group_index for group in restarted.accepted()] == [0, 1, 3, 4, 5, 6, 7]
        assert indices(restarted.lease("w", 8)) == [2]


def test_a_sweep_ends_expired_leases_though_nobody_leases_and_writes_nothing_otherwise(tmp_path: Path) -> None:
    now = [0.0]
    pool, queue = new_queue(tmp_path / "pool", 3, lease_seconds=10, clock=lambda: now[0])
    with pool, queue:
        lost, kept = queue.lease("w", 2)
        now[0] = 6.0
        queue.heartbeat([kept.lease])
        size = journal_size(pool)
        assert queue.sweep() == []
        assert journal_size(pool) == size
        now[0] = 10.5
        assert queue.sweep() == [lost.lease]
        assert queue.sweep() == []
        assert queue.heartbeat([kept.lease]) == [LeaseState.EXTENDED]
        assert indices(queue.lease("w", 3)) == [0, 2]


def test_an_expired_reader_of_a_partial_group_is_released(tmp_path: Path) -> None:
    now = [0.0]
    pool, queue = new_queue(tmp_path / "pool", 1, lease_seconds=10, clock=lambda: now[0])
    with pool, queue:
        queue.yield_groups([returned(pool, queue.lease("w", 1)[0], Stage.PARTIAL, 1)])
        queue.lease("gone", 1)
        now[0] = 11.0
        assert len(queue.sweep()) == 1
        (journal,) = (pool.root / "queues").glob("*/control/journal.log")
        assert journal.read_bytes().count(b'"ReaderDone"') == 1


def test_what_a_journal_says_of_an_accepted_group_is_what_the_audit_reads(opened: tuple[Pool, GroupQueue]) -> None:
    pool, queue = opened
    finish(pool, queue, queue.lease("w", 1)[0])
    queue.close()
    state = replay_journals(pool.root)
    assert state.accepted == {"prompt:0": 0}
    assert state.accepted_twice == []
