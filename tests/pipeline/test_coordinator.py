"""The coordinator's rules beyond those that producers and crashes exercise."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import straw

from pipeline.coordinator import TAKE_OVER_S, Coordinator, open_coordinator
from pipeline.coordinator_config import CoordinatorConfig
from pipeline.messages import AcceptRequest, HeldLease, LeaseStatus, Work
from pipeline.planner import oldest_version, select_groups
from storage.columns import encode_group
from storage.pool import Pool
from storage.prompt_codec import decode_prompt
from storage.queue import GroupQueue
from storage.queue_types import GroupReturn, Stage
from storage.summary import summarize
from tests.pipeline.mini_stream import synthetic_group, write_prompts
from vime.data.prompts import PromptSource
from vime.errors import StorageError


def hurried() -> Callable[[], float]:
    """A clock on which the time to take leases over is gone at once."""
    return itertools.count(0.0, TAKE_OVER_S).__next__


def opened(
    folder: Path,
    branch: str = "a",
    lease_seconds: float = 60,
    max_groups: int = 4,
    groups_wanted: int = 6,
    clock: Callable[[], float] = time.monotonic,
    **rules: Any,
) -> Coordinator:
    root = folder / "pool"
    return open_coordinator(
        open_pool=lambda: Pool.open(root) if (root / "vime" / "pool.json").exists() else Pool.create(root, "rollout"),
        source=PromptSource(write_prompts(folder), n_samples_per_prompt=2),
        owner="test",
        config=CoordinatorConfig(branch, [], groups_wanted, max_groups, lease_seconds, **rules),
        clock=clock,
    )


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    coordinator = opened(tmp_path)
    yield coordinator
    coordinator.close()


def published(folder: Path, work: Work, version: int) -> AcceptRequest:
    """A finished result of leased work."""
    with Pool.open(folder / "pool") as pool:
        group = synthetic_group(decode_prompt(pool.read_blob(work.prompt_ref)), version)
        (ref,) = pool.publish_groups([(encode_group(group), work.lease)], submission_id=f"s{work.group_index}")
    return AcceptRequest(work.lease, ref, summarize(group))


async def accept_one(coordinator: Coordinator, folder: Path, version: int) -> int:
    (work,) = coordinator.lease("w", 1).work
    (reply,) = await coordinator.accept([published(folder, work, version)])
    assert reply.position is not None
    return reply.position


async def test_highest_version_counts_every_branch_and_survives_a_restart(tmp_path: Path) -> None:
    first = opened(tmp_path)
    assert first.highest_version() == 0
    position = await accept_one(first, tmp_path, version=7)
    first.training_completed(0, 9, [position])
    assert first.highest_version() == 9
    first.close()
    second = opened(tmp_path, branch="b")
    assert second.highest_version() == 9
    second.close()


async def test_a_repeated_plan_changes_nothing_and_another_one_is_refused(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    positions = [await accept_one(coordinator, tmp_path, 1), await accept_one(coordinator, tmp_path, 1)]
    coordinator.record_plan("batch:a:0", positions, b"plan")
    coordinator.record_plan("batch:a:0", positions, b"plan")
    with pytest.raises(StorageError):
        coordinator.record_plan("batch:a:0", positions[:1], b"other")


async def test_a_restart_of_the_same_branch_remembers_what_was_trained(tmp_path: Path) -> None:
    first = opened(tmp_path)
    positions = [await accept_one(first, tmp_path, 1) for _ in range(3)]
    first.training_completed(0, 1, positions[:2])
    first.close()
    again = opened(tmp_path)
    assert (again.identity().trained, again.identity().pending) == (2, 1)
    again.close()
    other_branch = opened(tmp_path, branch="b")
    assert (other_branch.identity().trained, other_branch.identity().pending) == (0, 3)
    other_branch.close()


async def test_supply_ends_when_the_run_has_what_it_needs(coordinator: Coordinator, tmp_path: Path) -> None:
    for _ in range(4):
        await accept_one(coordinator, tmp_path, 1)
    assert coordinator.lease("w", 1).status is LeaseStatus.BACKPRESSURE
    coordinator.training_completed(0, 1, [0, 1, 2, 3])
    assert len(coordinator.lease("w", 5).work) == 2
    assert coordinator.lease("w", 1).status is LeaseStatus.DONE


async def test_waiting_ends_when_the_groups_are_there_or_the_time_is_up(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    assert await coordinator.wait_for_groups(1, 0.05) is None
    await accept_one(coordinator, tmp_path, 1)
    groups = await coordinator.wait_for_groups(1, 0.05)
    assert groups is not None
    assert len(groups) == 1


async def test_groups_whose_lease_expired_are_handed_out_again(tmp_path: Path) -> None:
    coordinator = opened(tmp_path, lease_seconds=0.1)
    held = coordinator.lease("w", 4).work
    assert coordinator.lease("w", 4).status is LeaseStatus.BACKPRESSURE
    await asyncio.sleep(0.15)
    assert coordinator.heartbeat([work.lease for work in held]) == [False] * 4
    again = coordinator.lease("w", 4).work
    assert [work.group_index for work in again] == [work.group_index for work in held]
    coordinator.close()


async def test_expired_leases_make_room_for_their_groups(tmp_path: Path) -> None:
    coordinator = opened(tmp_path, lease_seconds=0.1)
    held = coordinator.lease("w", 4).work
    request = published(tmp_path, held[0], 1)
    await asyncio.sleep(0.15)
    (reply,) = await coordinator.accept([request])
    assert reply.position is None
    assert [work.group_index for work in coordinator.lease("w", 4).work] == [work.group_index for work in held]
    coordinator.close()


def test_groups_in_flight_before_a_restart_are_handed_out_again_within_the_capacity_and_not_beside_it(
    tmp_path: Path,
) -> None:
    first = opened(tmp_path, max_groups=64, groups_wanted=1000, clock=hurried())
    before = {work.group_index for work in first.lease("w", 40).work}
    first.close()
    second = opened(tmp_path, "b", max_groups=64, groups_wanted=1000, clock=hurried())
    dispatched: set[int] = set()
    while work := second.lease("another", 16).work:
        dispatched |= {each.group_index for each in work}
    second.close()
    assert (len(before), len(before & dispatched), len(dispatched - before)) == (40, 40, 24)


async def test_acceptances_that_arrive_together_share_a_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = opened(tmp_path)
    requests = [published(tmp_path, work, 1) for work in coordinator.lease("w", 3).work]
    transactions = []
    yield_tasks = straw.Coordinator.yield_tasks

    def counting(self: straw.Coordinator, updates: list[Any], *, request_id: str) -> object:
        transactions.append(len(updates))
        return yield_tasks(self, updates, request_id=request_id)

    monkeypatch.setattr(straw.Coordinator, "yield_tasks", counting)
    replies = await asyncio.gather(*(coordinator.accept([request]) for request in requests))
    assert [reply.position for (reply,) in replies] == [0, 1, 2]
    assert transactions == [3]
    coordinator.close()


async def test_a_result_of_another_lease_is_refused_alone(coordinator: Coordinator, tmp_path: Path) -> None:
    first, second = (published(tmp_path, work, 1) for work in coordinator.lease("w", 2).work)
    wrong = msgspec.structs.replace(second, ref=first.ref)
    outcomes = await asyncio.gather(coordinator.accept([first]), coordinator.accept([wrong]), return_exceptions=True)
    assert [reply.position for reply in outcomes[0]] == [0]  # type: ignore[union-attr]
    assert isinstance(outcomes[1], StorageError)
    (late,) = await coordinator.accept([second])
    assert late.position == 1


async def test_calls_repeated_after_a_restart_change_nothing(tmp_path: Path) -> None:
    first = opened(tmp_path)
    accepted, dropped, released = first.lease("w", 3).work
    request = published(tmp_path, accepted, 1)
    before = await first.accept([request])
    first.drop(dropped.group_index, dropped.lease, "reward")
    first.release(released.group_index, released.lease, "aborted")
    first.close()
    again = opened(tmp_path)
    assert await again.accept([request]) == before
    again.drop(dropped.group_index, dropped.lease, "reward")
    again.release(released.group_index, released.lease, "aborted")
    counts, identity = again.counts(), again.identity()
    assert (counts.generated, counts.pending, counts.in_flight, counts.dropped) == (3, 1, 1, {"reward": 1})
    assert (identity.generated, identity.pending, identity.in_flight, identity.dropped) == (3, 1, 1, {"reward": 1})
    again.close()


async def test_a_stale_attempt_cannot_set_its_group_aside(tmp_path: Path) -> None:
    first = opened(tmp_path)
    (work,) = first.lease("w", 1).work
    first.close()
    again = opened(tmp_path, clock=hurried())
    again.drop(work.group_index, work.lease, "reward")
    assert again.counts().dropped == {}
    assert [new.group_index for new in again.lease("w", 1).work] == [work.group_index]
    again.close()


def test_a_commit_and_the_progress_view_never_read_the_whole_queue(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def whole_queue(_: GroupQueue) -> None:
        raise AssertionError("its time grows with all groups of the run")

    coordinator.lease("w", 2)
    monkeypatch.setattr(GroupQueue, "facts", whole_queue)
    monkeypatch.setattr(GroupQueue, "accepted", whole_queue)
    assert coordinator.counts().in_flight == 2
    assert coordinator.queue_state().next_group_index == 8


async def test_max_staleness_paces_leases_and_drops_nothing(tmp_path: Path) -> None:
    coordinator = opened(tmp_path, max_groups=9, batch=2, max_staleness=1)
    first = coordinator.lease("w", 9, 5)
    assert (first.status, len(first.work)) == (LeaseStatus.WORK, 4)  # two batches: planned at versions 5 and 6
    assert coordinator.lease("w", 9, 5).status is LeaseStatus.BACKPRESSURE
    replies = await coordinator.accept([published(tmp_path, work, 5) for work in first.work[:2]])
    positions = [reply.position for reply in replies if reply.position is not None]
    coordinator.training_completed(0, 5, positions)
    assert coordinator.lease("w", 9, 5).status is LeaseStatus.BACKPRESSURE  # the two in flight can be 1 version old
    assert coordinator.lease("w", 9, 6).status is LeaseStatus.BACKPRESSURE
    coordinator.release(first.work[2].group_index, first.work[2].lease, "aborted")
    assert len(coordinator.lease("w", 9, 6).work) == 1
    assert coordinator.counts().dropped == {}
    coordinator.close()


async def test_a_batch_without_a_publication_after_it_lets_the_next_be_made_under_the_same_version(
    tmp_path: Path,
) -> None:
    coordinator = opened(tmp_path, max_groups=9, batch=2, max_staleness=0)
    first = coordinator.lease("w", 9, 5)
    replies = await coordinator.accept([published(tmp_path, work, 5) for work in first.work])
    coordinator.training_completed(0, 5, [reply.position for reply in replies if reply.position is not None])
    assert coordinator.lease("w", 9, 5).status is LeaseStatus.BACKPRESSURE, "version 6 is about to be published"
    coordinator.keep_version(5)
    assert len(coordinator.lease("w", 9, 5).work) == 2
    coordinator.close()


async def test_a_producer_that_asks_at_every_moment_makes_samples_of_exactly_one_age_for_an_experiment(
    tmp_path: Path,
) -> None:
    batch, behind = 2, 2
    coordinator = opened(tmp_path, max_groups=(1 + behind) * batch, groups_wanted=100, batch=batch, newest_only=True)

    async def fill(version: int) -> None:
        work = coordinator.lease("w", 100, version).work
        await coordinator.accept([published(tmp_path, item, version) for item in work])

    ages = []
    for rollout_id, version in enumerate(range(1, 7)):
        await fill(version)
        groups = await coordinator.wait_for_groups((1 + behind) * batch, 5)
        assert groups is not None
        chosen = select_groups(groups, batch)
        ages.append([version - oldest_version(group.summary) for group in chosen])
        coordinator.training_completed(rollout_id, version, [group.position for group in chosen])
        await fill(version)
    assert ages == [[0, 0], [1, 1], [2, 2], [2, 2], [2, 2], [2, 2]]
    coordinator.close()


async def test_a_returned_group_keeps_the_age_of_its_tokens(tmp_path: Path) -> None:
    coordinator = opened(tmp_path, max_groups=9, batch=2, max_staleness=1)
    (work,) = coordinator.lease("w", 1, 5).work
    request = published(tmp_path, work, 5)
    assert coordinator.yield_groups([GroupReturn(work.lease, request.ref, Stage.PARTIAL, 5)]) == [True]
    (again,) = coordinator.lease("w", 1, 6).work
    assert (again.group_index, again.stage, again.prompt_ref) == (work.group_index, Stage.PARTIAL, request.ref)
    assert len(coordinator.lease("w", 9, 6).work) == 1  # one batch with it, at version 6
    coordinator.close()


async def test_surplus_groups_of_a_fast_producer_wait_and_the_identity_holds_at_all_times(tmp_path: Path) -> None:
    """A producer that is far ahead of batches of 8; some of its groups are dropped with a reason."""
    coordinator = opened(tmp_path, max_groups=32, groups_wanted=40, batch=8)
    seen = []

    def check() -> None:
        identity, counts = coordinator.identity(), coordinator.counts()
        assert identity.holds
        parts = counts.trained + counts.pending + counts.in_flight + sum(counts.dropped.values())
        assert counts.generated == parts == identity.generated
        seen.append((counts.trained, counts.pending, counts.dropped.get("filtered", 0)))

    for rollout in range(3):
        while work := coordinator.lease("w", 8).work:
            check()
            dropped, kept = work[1:2], [*work[:1], *work[2:]]
            for item in dropped:
                coordinator.drop(item.group_index, item.lease, "filtered")
            check()
            await coordinator.accept([published(tmp_path, item, 1) for item in kept])
            check()
        groups = await coordinator.wait_for_groups(8, 5)
        assert groups is not None
        coordinator.training_completed(rollout, 1, [group.position for group in groups[:8]])
        check()
    trained, pending, filtered = seen[-1]
    assert trained == 24
    assert trained + pending == coordinator.counts().generated - filtered
    assert pending >= 8  # what no batch has taken is still there
    coordinator.close()


async def test_a_restarted_coordinator_hands_out_nothing_until_producers_had_time_to_take_their_groups_over(
    tmp_path: Path,
) -> None:
    first = opened(tmp_path)
    work = first.lease("w", 2, policy_version=3).work
    first.close()
    now = [0.0]
    second = opened(tmp_path, clock=lambda: now[0])
    try:
        assert second.lease("v", 1).status is LeaseStatus.BACKPRESSURE
        taken = second.take_over("w", [HeldLease(item.lease, 3) for item in work])
        assert None not in taken
        assert second.counts().in_flight == 2
        now[0] = TAKE_OVER_S
        assert {item.group_index for item in second.lease("v", 2).work} == {2, 3}
    finally:
        second.close()


async def test_what_a_dead_producer_leased_waits_again_at_once(coordinator: Coordinator) -> None:
    coordinator.lease("producer-1-700", 1)
    mine = {item.group_index for item in coordinator.lease("producer-10-701", 1).work}
    coordinator.retire("producer-1")
    (again,) = coordinator.lease("producer-1-702", 1).work
    assert again.group_index == 0
    assert mine == {1}


async def test_on_a_new_branch_what_the_commit_does_not_call_trained_is_pending_and_leases_go_on(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    positions = [await accept_one(coordinator, tmp_path, 1) for _ in range(3)]
    coordinator.training_completed(0, 1, positions[:1])
    coordinator.training_completed(1, 2, positions[1:])
    (work,) = coordinator.lease("w", 1).work
    config = CoordinatorConfig("b", [(0, 0)], 6, 4, 60, session="a")
    for _ in range(2):  # the answer to the first call may be lost
        coordinator.begin_branch(config)
        assert (coordinator.counts().trained, coordinator.counts().pending) == (1, 2)
    coordinator.training_completed(1, 3, positions[1:])
    assert coordinator.counts().pending == 0
    assert coordinator.highest_version() == 3
    (reply,) = await coordinator.accept([published(tmp_path, work, 3)])
    assert reply.position is not None
