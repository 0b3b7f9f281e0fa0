"""What every queue and its pool promise, on disk and in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage.columns import EncodedGroup, decode_group, encode_group
from storage.contracts import PayloadPool, QueueOfGroups
from storage.positions import PositionRanges
from storage.prompt_codec import decode_prompt
from storage.queue_types import GroupResult, GroupReturn, LeasedGroup, LeaseState, Receipt, Stage
from storage.refs import PoolRef
from storage.summary import summarize
from tests.storage.queue_helpers import (
    cursor_at,
    finish,
    new_memory_queue,
    new_queue,
    prompts,
    publish,
    samples_of,
    submit,
)
from vime.data.cursor import PromptCursor
from vime.errors import StaleLeaseError, StorageError

Opened = tuple[PayloadPool, QueueOfGroups]
KINDS: dict[str, Callable[..., Any]] = {"disk": new_queue, "memory": new_memory_queue}


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(params=KINDS)
def new(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Opens a queue of one kind: `new(num_groups, lease_seconds=60, clock=...)`."""
    opened: list[Opened] = []

    def open_one(num_groups: int = 0, lease_seconds: float = 60, clock: Callable[[], float] = time.monotonic) -> Opened:
        opened.append(KINDS[request.param](tmp_path / f"pool{len(opened)}", num_groups, lease_seconds, clock))
        return opened[-1]

    yield open_one
    for pool, queue in opened:
        queue.close()
        pool.close()


@pytest.fixture
def opened(new: Callable[..., Opened]) -> Opened:
    return new(4)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_group_goes_from_prompt_to_accepted_result(opened: Opened) -> None:
    pool, queue = opened
    leased = queue.lease("w", 1)[0]
    assert decode_prompt(pool.read_blob(leased.prompt_ref)) == prompts(0, 1)[0]

    receipt = finish(pool, queue, leased)

    accepted = queue.accepted()
    assert receipt == Receipt(position=0, group_index=0)
    assert [group.group_index for group in accepted] == [0]
    group = pool.read_group(accepted[0].ref)
    assert decode_group(group.header, group.columns) == samples_of(0)


def test_facts_sort_every_group_into_one_part(opened: Opened) -> None:
    pool, queue = opened
    first, second, third = queue.lease("w", 3)
    finish(pool, queue, second)
    queue.drop(first.lease, "zero_std")
    queue.release([third.lease], "engine aborted")

    facts = queue.facts()

    assert facts.accepted == {1: 0}
    assert facts.dropped == {0: "zero_std"}
    assert facts.in_flight == [2]
    assert facts.fresh == [3]
    assert facts.num_groups == facts.cursor.next_group_index == 4


def test_released_groups_are_leased_before_fresh_ones(opened: Opened) -> None:
    _, queue = opened
    first = queue.lease("w", 1)[0]
    assert queue.release([first.lease], "x") == [True]

    again = queue.lease("w", 1)[0]

    assert (again.group_index, again.attempt) == (0, 2)


def test_a_release_is_repeatable_and_does_not_touch_the_next_attempt(opened: Opened) -> None:
    _, queue = opened
    first = queue.lease("w", 1)[0]
    assert queue.release([first.lease], "x") == [True]
    again = queue.lease("w", 1)[0]
    assert queue.release([first.lease], "x") == [True]
    assert queue.heartbeat([again.lease]) == [LeaseState.EXTENDED]


def test_positions_follow_the_order_of_acceptance(opened: Opened) -> None:
    pool, queue = opened
    first, second, third = queue.lease("w", 3)
    receipts = [finish(pool, queue, leased) for leased in (third, first, second)]
    assert [(receipt.position, receipt.group_index) for receipt in receipts] == [(0, 2), (1, 0), (2, 1)]
    assert [group.group_index for group in queue.accepted(except_for=PositionRanges([(1, 1)]))] == [2, 1]


def test_accepting_twice_gives_the_same_receipt(opened: Opened) -> None:
    pool, queue = opened
    leased = queue.lease("w", 1)[0]
    ref, summary = publish(pool, leased), summarize(samples_of(0))
    receipt = queue.accept(leased.lease, ref, summary)
    assert queue.accept(leased.lease, ref, summary) == receipt
    assert queue.num_accepted == 1


def test_one_attempt_cannot_have_two_results(opened: Opened) -> None:
    pool, queue = opened
    leased = queue.lease("w", 1)[0]
    finish(pool, queue, leased)
    changed = [(encode_group(samples_of(0, num_tokens=5)), leased.lease)]
    (other,) = pool.publish_groups(changed, submission_id="other")
    with pytest.raises(StorageError, match="accept group 0"):
        queue.accept(leased.lease, other, summarize(samples_of(0)))
    assert queue.num_accepted == 1


def test_one_attempt_cannot_have_two_results_in_one_call_either(opened: Opened) -> None:
    pool, queue = opened
    leased = queue.lease("w", 1)[0]
    first = publish(pool, leased)
    changed = [(encode_group(samples_of(0, num_tokens=5)), leased.lease)]
    (other,) = pool.publish_groups(changed, submission_id="other")
    results = [GroupResult(leased.lease, ref, summarize(samples_of(0))) for ref in (first, other)]
    with pytest.raises(StorageError, match="accept group 0"):
        queue.accept_many(results)
    assert queue.num_accepted == 1


def test_a_result_that_was_published_for_another_lease_is_refused(opened: Opened) -> None:
    pool, queue = opened
    first, second = queue.lease("w", 2)
    ref = publish(pool, first)
    with pytest.raises(StorageError, match="does not belong to task"):
        queue.accept(second.lease, ref, summarize(samples_of(1)))
    with pytest.raises(StorageError, match="result of group 0 came with a lease of group 1"):
        queue.accept(second.lease, ref, summarize(samples_of(0)))


def test_a_stale_attempt_cannot_accept_after_its_group_was_leased_again(
    new: Callable[..., Opened], clock: Clock
) -> None:
    pool, queue = new(1, lease_seconds=10, clock=clock)
    late = queue.lease("slow", 1)[0]
    clock.now_s = 10.1
    assert queue.heartbeat([late.lease]) == [LeaseState.EXPIRED]
    current = queue.lease("quick", 1)[0]
    assert queue.heartbeat([late.lease, current.lease]) == [LeaseState.STALE, LeaseState.EXTENDED]

    with pytest.raises(StaleLeaseError, match="accept group 0, attempt 1: the lease has expired or its group was"):
        finish(pool, queue, late)
    with pytest.raises(StaleLeaseError):
        queue.drop(late.lease, "reward")

    finish(pool, queue, current)
    assert queue.facts().accepted == {0: 0}


def test_an_expired_attempt_cannot_accept_though_nobody_else_has_its_group(
    new: Callable[..., Opened], clock: Clock
) -> None:
    pool, queue = new(1, lease_seconds=10, clock=clock)
    late = queue.lease("slow", 1)[0]
    clock.now_s = 10.1
    with pytest.raises(StaleLeaseError):
        finish(pool, queue, late)


def test_an_expired_attempt_spoils_no_result_that_came_with_its_own(new: Callable[..., Opened], clock: Clock) -> None:
    pool, queue = new(2, lease_seconds=10, clock=clock)
    late = queue.lease("slow", 1)[0]
    clock.now_s = 6
    quick = queue.lease("quick", 1)[0]
    clock.now_s = 10.1
    results = [GroupResult(g.lease, publish(pool, g), summarize(samples_of(g.group_index))) for g in (late, quick)]
    assert queue.accept_many(results) == [None, Receipt(0, 1)]


def test_a_sweep_ends_expired_leases_and_tells_them(new: Callable[..., Opened], clock: Clock) -> None:
    _, queue = new(2, lease_seconds=10, clock=clock)
    early = queue.lease("w", 1)[0]
    clock.now_s = 6
    late = queue.lease("w", 1)[0]
    clock.now_s = 10.1
    assert queue.sweep() == [early.lease]
    assert queue.sweep() == []
    assert queue.heartbeat([early.lease, late.lease]) == [LeaseState.STALE, LeaseState.EXTENDED]


def test_heartbeats_keep_a_lease_past_its_first_deadline(new: Callable[..., Opened], clock: Clock) -> None:
    pool, queue = new(1, lease_seconds=10, clock=clock)
    leased = queue.lease("w", 1)[0]
    for _ in range(3):
        clock.now_s += 6
        assert queue.heartbeat([leased.lease]) == [LeaseState.EXTENDED]
    assert queue.lease("other", 1) == []
    finish(pool, queue, leased)


def test_dropping_twice_is_once_and_needs_a_reason(opened: Opened) -> None:
    _, queue = opened
    leased = queue.lease("w", 1)[0]
    with pytest.raises(StorageError, match="without a reason"):
        queue.drop(leased.lease, "")
    queue.drop(leased.lease, "reward")
    queue.drop(leased.lease, "reward")
    assert queue.facts().dropped_by_reason() == {"reward": 1}


def test_submitting_the_same_prompts_again_changes_nothing(opened: Opened) -> None:
    _, queue = opened
    submit(queue, 4, 6)
    submit(queue, 0, 4)
    submit(queue, 4, 6)
    assert queue.facts().num_groups == 6
    assert queue.cursor() == cursor_at(6)


def test_prompts_that_skip_or_change_a_group_are_refused(opened: Opened) -> None:
    _, queue = opened
    with pytest.raises(StorageError, match="start at group 5, the queue continues at 4"):
        submit(queue, 5, 6)
    with pytest.raises(StorageError, match="in order up to 6, found"):
        queue.submit_prompts(prompts(4, 6), cursor_at(7))
    changed = prompts(0, 4)
    changed[2:3] = prompts(9, 10)
    with pytest.raises(StorageError, match="found"):
        queue.submit_prompts(changed, cursor_at(4))
    with pytest.raises(StorageError, match="with cursor"):
        queue.submit_prompts(prompts(0, 4), PromptCursor(1, 0, 4, 8))
    assert queue.facts().num_groups == 4


def test_plans_and_steps_are_recorded_once_and_only_over_accepted_groups(opened: Opened) -> None:
    pool, queue = opened
    for leased in queue.lease("w", 3):
        finish(pool, queue, leased)
    ref = pool.publish_blob(b"plan", submission_id="plan")
    queue.record_plan("main/0", [0, 2], ref)
    queue.record_plan("main/0", [0, 2], ref)
    with pytest.raises(StorageError, match="record plan main/0"):
        queue.record_plan("main/0", [0, 1], ref)
    with pytest.raises(StorageError, match=r"positions \[3\] are not accepted, allowed in segment 0: 0..2"):
        queue.record_plan("main/1", [3], ref)
    plan = queue.plan("main/0")
    assert plan is not None
    assert pool.read_blob(plan.plan_ref) == b"plan"
    queue.record_trained("main", 0, 1, [0, 2])
    queue.record_trained("main", 0, 1, [0, 2])
    with pytest.raises(StorageError, match="position 2 was trained by step 0 of branch 'main'"):
        queue.record_trained("main", 1, 2, [1, 2])
    with pytest.raises(StorageError, match=r"positions \[7\] are not accepted"):
        queue.record_trained("main", 1, 2, [7])
    assert queue.trained_by("main").ranges() == [(0, 0), (2, 2)]
    assert queue.highest_trained_version() == 1


def test_a_rotation_changes_no_count_and_no_lease(opened: Opened) -> None:
    pool, queue = opened
    first, second, third, fourth = queue.lease("w", 4)
    finish(pool, queue, first)
    finish(pool, queue, second)
    queue.drop(third.lease, "reward")
    queue.record_trained("main", 0, 1, [0])
    queue.rotate("main", PositionRanges([(0, 0)]))
    facts = queue.facts()
    assert (facts.num_groups, facts.num_accepted, facts.dropped_by_reason()) == (4, 2, {"reward": 1})
    assert [group.position for group in queue.accepted(except_for=PositionRanges([(0, 0)]))] == [1]
    assert queue.heartbeat([fourth.lease]) == [LeaseState.EXTENDED]
    queue.reopen(PositionRanges([(0, 1)]))
    with pytest.raises(StorageError, match=r"positions 0..2 are called trained"):
        queue.reopen(PositionRanges([(0, 2)]))


def test_a_closed_queue_says_so(opened: Opened) -> None:
    _, queue = opened
    queue.close()
    with pytest.raises(StorageError, match="is closed"):
        queue.lease("w", 1)


def test_only_the_named_columns_are_read(opened: Opened) -> None:
    pool, queue = opened
    ref = publish(pool, queue.lease("w", 1)[0])
    columns = pool.read_columns(ref, ["loss_mask"])
    assert list(columns) == ["loss_mask"]
    assert columns["loss_mask"].tolist() == [1] * 6
    with pytest.raises(StorageError, match=r"no columns \['routes'\], it has \[.*'sampler_log_probs', 'tokens'"):
        pool.read_columns(ref, ["routes"])


def test_groups_without_tokens_are_kept_too(opened: Opened) -> None:
    pool, queue = opened
    samples = samples_of(0)
    for sample in samples:
        sample.tokens, sample.response_length, sample.rollout_log_probs = [], 0, []
    lease = queue.lease("w", 1)[0].lease
    group = pool.read_group(pool.publish_groups([(encode_group(samples), lease)], submission_id="x")[0])
    assert decode_group(group.header, group.columns) == samples


def test_publishing_again_gives_the_same_references(opened: Opened) -> None:
    pool, queue = opened
    items = [(encode_group(samples_of(group.group_index)), group.lease) for group in queue.lease("w", 4)]
    refs = pool.publish_groups(items, submission_id="batch")
    assert pool.publish_groups(items, submission_id="batch") == refs
    assert len(set(refs)) == 4


def test_non_contiguous_and_big_endian_columns_come_back_equal(opened: Opened) -> None:
    pool, queue = opened
    group = encode_group(samples_of(0))
    columns: dict[str, Any] = dict(group.columns)
    columns["tokens"] = np.repeat(columns["tokens"], 2)[::2].astype(">i4")
    lease = queue.lease("w", 1)[0].lease
    ref = pool.publish_groups([(EncodedGroup(group.header, columns), lease)], submission_id="x")[0]
    assert decode_group(group.header, pool.read_group(ref).columns) == samples_of(0)


def test_threads_share_a_pool(opened: Opened) -> None:
    pool, _ = opened
    refs: dict[bytes, PoolRef] = {}

    def write(thread: int) -> None:
        for number in range(5):
            data = f"{thread}:{number}".encode()
            refs[data] = pool.publish_blob(data, submission_id=data.decode())
            assert pool.read_blob(refs[data]) == data

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refs) == 30
    assert all(pool.read_blob(ref) == data for data, ref in refs.items())


def test_a_closed_pool_says_so(opened: Opened) -> None:
    pool, queue = opened
    ref = pool.publish_blob(b"x", submission_id="1")
    queue.close()
    pool.close()
    with pytest.raises(StorageError, match="is closed"):
        pool.publish_blob(b"y", submission_id="2")
    with pytest.raises(StorageError, match="is closed"):
        pool.read_blob(ref)


def returned(pool: PayloadPool, queue: QueueOfGroups, leased: LeasedGroup, stage: Stage, version: int | None) -> bool:
    """Give a group back with samples."""
    ref = publish(pool, leased, f"returned {leased.group_index}:{leased.attempt}")
    return queue.yield_groups([GroupReturn(leased.lease, ref, stage, version)]) == [True]


def test_completed_groups_come_before_partial_ones_and_these_before_prompts(opened: Opened) -> None:
    pool, queue = opened
    first, second, third = queue.lease("w", 3)
    assert returned(pool, queue, second, Stage.PARTIAL, 1)
    assert returned(pool, queue, first, Stage.PARTIAL, 1)
    assert returned(pool, queue, third, Stage.COMPLETED, 9)
    leased = queue.lease("w", 9)
    assert [(group.group_index, group.stage) for group in leased] == [
        (2, Stage.COMPLETED), (1, Stage.PARTIAL), (0, Stage.PARTIAL), (3, Stage.FRESH),
    ]  # fmt: skip


def test_in_a_stage_the_oldest_version_comes_first_and_none_last(opened: Opened) -> None:
    pool, queue = opened
    for leased, version in zip(queue.lease("w", 4), (7, None, 3, 7), strict=True):
        assert returned(pool, queue, leased, Stage.PARTIAL, version)
    again = queue.lease("w", 4)
    assert [(group.group_index, group.min_version) for group in again] == [(2, 3), (0, 7), (3, 7), (1, None)]


def test_a_returned_group_starts_from_what_it_had(opened: Opened) -> None:
    pool, queue = opened
    first = queue.lease("w", 1)[0]
    assert returned(pool, queue, first, Stage.PARTIAL, 2)
    again = queue.lease("w", 1)[0]
    assert (again.group_index, again.attempt) == (0, 2)
    group = pool.read_group(again.prompt_ref)
    assert decode_group(group.header, group.columns) == samples_of(0)
    assert queue.facts().in_flight == [0]


def test_a_completed_group_is_accepted_with_the_result_that_it_started_from(opened: Opened) -> None:
    pool, queue = opened
    assert returned(pool, queue, queue.lease("w", 1)[0], Stage.COMPLETED, 2)
    again = queue.lease("w", 1)[0]
    assert queue.accept(again.lease, again.prompt_ref, summarize(samples_of(0))).group_index == 0


def test_returning_twice_is_once_and_a_stale_attempt_returns_nothing(opened: Opened) -> None:
    pool, queue = opened
    first = queue.lease("w", 1)[0]
    ref = publish(pool, first)
    item = GroupReturn(first.lease, ref, Stage.PARTIAL, 1)
    assert queue.yield_groups([item]) == [True]
    assert queue.yield_groups([item]) == [True]
    second = queue.lease("w", 1)[0]
    assert queue.heartbeat([first.lease, second.lease]) == [LeaseState.STALE, LeaseState.EXTENDED]
    queue.release([second.lease], "aborted")
    late = publish(pool, second)
    assert queue.yield_groups([GroupReturn(second.lease, late, Stage.PARTIAL, 1)]) == [False]


def test_many_results_are_accepted_together_and_stale_ones_are_told(opened: Opened) -> None:
    pool, queue = opened
    first, second = queue.lease("w", 2)
    queue.release([first.lease], "aborted")
    results = [GroupResult(g.lease, publish(pool, g), summarize(samples_of(g.group_index))) for g in (first, second)]
    assert queue.accept_many(results) == [None, Receipt(0, 1)]
