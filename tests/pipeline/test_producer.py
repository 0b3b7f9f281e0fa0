"""The producer against a stand-in engine: groups are neither lost nor made in excess, whatever fails."""

import asyncio
import contextlib
import fractions
import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jinja2 import TemplateError

from pipeline.packing import PackingSettings
from pipeline.planner import PlanSettings, plan_batch
from storage.checks import EnqueueRequirements, check_enqueue
from storage.columns import decode_group
from storage.dead_letters import DeadLetter, letters_folder, read_letters
from storage.pool import Pool
from storage.writer import WriteLimits
from tests.pipeline.stream_parts import CharTokenizer, Parts, stream
from tests.support.standin_engine import StandinEngine
from vime.errors import DiskFullError, StorageError
from vime.rollout.sampling import SamplingSettings
from vime.utils.types import Sample

pytestmark = pytest.mark.usefixtures("quick_retries")

PLAN = PlanSettings(
    rollout_batch_size=4,
    rollouts_per_step=8,
    packing=PackingSettings(num_ranks=1, max_tokens=64),
    normalize_rewards=True,
    normalize_std=True,
)


async def running_requests(parts: Parts, count: int) -> None:
    """Until the engine works on so many requests, each with some tokens made."""
    while (await parts.client.metrics()).num_running < count:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)


async def settled(parts: Parts) -> None:
    """Until the queue hands out nothing more and nothing is in flight."""
    for _ in range(400):
        await asyncio.sleep(0.02)
        counts = parts.coordinator.counts()
        if counts.in_flight == 0 and (counts.backpressured or counts.pending > 0):
            return
    raise AssertionError(parts.coordinator.counts())


async def test_backpressure_holds_the_limit_and_drops_nothing(tmp_path: Path, engine: StandinEngine) -> None:
    async with stream(tmp_path, engine, max_groups=5) as parts:
        await parts.until_pending(5)
        await asyncio.sleep(0.3)
        counts = parts.coordinator.counts()
        assert (counts.pending, counts.in_flight, counts.dropped) == (5, 0, {})
        assert counts.backpressured
        assert parts.coordinator.identity().holds


async def test_no_more_groups_are_made_than_the_run_needs(tmp_path: Path, engine: StandinEngine) -> None:
    async with stream(tmp_path, engine, groups_wanted=3) as parts:
        await parts.until_pending(3)
        await asyncio.sleep(0.3)
        assert parts.coordinator.counts().generated == 3


async def test_stored_groups_are_what_the_engine_said(tmp_path: Path, engine: StandinEngine) -> None:
    async with stream(tmp_path, engine, groups_wanted=2) as parts:
        await parts.until_pending(2)
        groups = await parts.coordinator.wait_for_groups(2, 1)
        assert groups is not None
        with Pool.open(tmp_path / "pool") as pool:
            stored = pool.read_group(groups[0].ref)
        samples = decode_group(stored.header, stored.columns)
    check_enqueue(samples, EnqueueRequirements())
    for sample in samples:
        assert sample.response_length == 6
        assert sample.version_spans == [(1, 0, 6)]
        assert sample.reward == 1.0
    assert [sample.index for sample in samples] == groups[0].summary.sample_indices


async def test_aborted_groups_come_back_and_are_generated_again(tmp_path: Path, engine: StandinEngine) -> None:
    engine.faults.step_s = 0.02
    async with stream(tmp_path, engine, groups_wanted=4, response_tokens=60) as parts:
        await running_requests(parts, 8)
        await parts.client.pause("abort")
        await asyncio.sleep(0.05)
        await parts.client.resume()
        await parts.until_pending(4)
        assert any(reason.startswith("aborted") for reason in parts.queue.released)
        assert parts.producer.stats().groups_aborted > 0
        assert parts.coordinator.counts().dropped == {}


async def test_requests_in_flight_at_a_version_change_have_tokens_of_both(
    tmp_path: Path, engine: StandinEngine
) -> None:
    engine.faults.step_s = 0.02
    async with stream(tmp_path, engine, groups_wanted=4, response_tokens=60) as parts:
        await running_requests(parts, 8)
        parts.producer.gate.pause()
        await parts.client.pause("keep")
        engine.version = "2"
        await parts.client.resume()
        parts.producer.gate.resume(2)
        await parts.until_pending(4)
        groups = await parts.coordinator.wait_for_groups(4, 1)
        assert groups is not None
        spanning = [group for group in groups if group.summary.num_spanning_samples]
        assert spanning
        assert {(1, 2)} == {(group.summary.min_versions[0], group.summary.max_versions[0]) for group in spanning}
        assert parts.producer.stats().spanning_samples == sum(group.summary.num_spanning_samples for group in groups)


async def test_no_request_starts_while_admission_is_paused(tmp_path: Path, engine: StandinEngine) -> None:
    async with stream(tmp_path, engine) as parts:
        await parts.until_pending(2)
        parts.producer.gate.pause()
        await asyncio.sleep(0.3)
        before = parts.coordinator.counts().pending
        await asyncio.sleep(0.3)
        assert parts.coordinator.counts().pending == before
        assert (await parts.client.metrics()).num_running == 0


async def hanging(args: Any, sample: Sample) -> float:  # noqa: ARG001
    await asyncio.sleep(60)
    return 1.0


def returning(value: Any) -> Any:
    async def reward(args: Any, sample: Sample) -> Any:  # noqa: ARG001
        return value

    return reward


async def varied(args: Any, sample: Sample) -> float:  # noqa: ARG001
    return float((sample.index or 0) % 2)


async def raising(args: Any, sample: Sample) -> float:  # noqa: ARG001
    raise KeyError("no such environment")


async def deaf(args: Any, sample: Sample) -> float:
    """Goes on when it is cancelled for the first time."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(60)
    return await hanging(args, sample)


def letters_of(folder: Path) -> list[DeadLetter]:
    letters, unreadable = read_letters(letters_folder(folder))
    assert unreadable == []
    return letters


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (returning(None), "reward_none"),
        (returning(math.nan), "reward_nan"),
        (returning(math.inf), "reward_infinite"),
        (returning("0.5"), "reward_not_a_number"),
        (returning([0.5]), "reward_not_a_number"),
        (returning(True), "reward_not_a_number"),
        (returning({"math": 1.0}), "reward_key_missing"),
        (raising, "reward_raised"),
        (hanging, "reward_timeout"),
        (deaf, "reward_timeout"),
    ],
    ids=["None", "NaN", "inf", "text", "list", "bool", "dict", "raises", "hangs", "hangs-deaf"],
)
async def test_bad_rewards_are_set_aside_with_their_own_reason_and_batches_stay_finite(
    tmp_path: Path, engine: StandinEngine, reward: Any, reason: str
) -> None:
    async def sometimes(args: Any, sample: Sample) -> Any:
        return await (reward if sample.group_index == 0 else varied)(args, sample)

    async with stream(tmp_path, engine, reward=sometimes, groups_wanted=4) as parts:
        await parts.until_pending(4)
        await settled(parts)
        counts = parts.coordinator.counts()
        assert counts.dropped == {reason: 1}
        assert counts.pending == 4, "a dropped group is replaced"
        groups = await parts.coordinator.wait_for_groups(4, 1)
        assert groups is not None
        plan = plan_batch(groups, PLAN, branch="b", rollout_id=0, policy_version=1)
        assert all(math.isfinite(sample.advantage) for sample in plan.samples)
        assert parts.coordinator.identity().holds
        letters = letters_of(tmp_path)
        assert {(letter.group_index, letter.reason) for letter in letters} == {(0, reason)}
        assert {letter.attempt for letter in letters} == {1, 2}
        assert parts.producer.stats().failed_samples == {reason: len(letters)}


def grouped(values: Any) -> Any:
    """A reward of whole groups that returns `values` for group 0."""

    async def reward(args: Any, samples: list[Sample]) -> Any:  # noqa: ARG001
        return values if samples[0].group_index == 0 else [0.0, 1.0]

    return reward


@pytest.mark.parametrize(
    ("values", "reason", "samples"),
    [
        ([1.0], "reward_count", [[0, 1]]),
        ([1.0, 2.0, 3.0], "reward_count", [[0, 1]]),
        (1.0, "reward_count", [[0, 1]]),
        (None, "reward_count", [[0, 1]]),
        ([1.0, None], "reward_none", [[1]]),
        ([math.nan, math.nan], "reward_nan", [[0], [1]]),
    ],
    ids=["too-few", "too-many", "one-for-all", "None", "one-None", "NaN"],
)
async def test_bad_rewards_of_a_group_are_set_aside_and_never_spread_over_its_samples(
    tmp_path: Path, engine: StandinEngine, values: Any, reason: str, samples: list[list[int]]
) -> None:
    async with stream(tmp_path, engine, group_reward=grouped(values), groups_wanted=3, max_attempts=1) as parts:
        await parts.until_pending(3)
        await settled(parts)
        assert parts.coordinator.counts().dropped == {reason: 1}
        groups = await parts.coordinator.wait_for_groups(3, 1)
        assert groups is not None
        assert {tuple(group.summary.rewards) for group in groups} == {(0.0, 1.0)}
    assert [letter.sample_indices for letter in letters_of(tmp_path)] == samples


async def test_a_group_reward_is_called_once_for_all_samples_of_a_group(tmp_path: Path, engine: StandinEngine) -> None:
    calls: list[list[int]] = []

    async def counting(args: Any, samples: list[Sample]) -> list[float]:  # noqa: ARG001
        calls.append([sample.index or 0 for sample in samples])
        assert all(sample.response_length for sample in samples)
        return [0.5] * len(samples)

    async with stream(tmp_path, engine, group_reward=counting, groups_wanted=2) as parts:
        await parts.until_pending(2)
        await settled(parts)
    assert sorted(calls) == [[0, 1], [2, 3]]


async def test_a_failing_sample_keeps_its_content_message_and_trace(tmp_path: Path, engine: StandinEngine) -> None:
    async with stream(tmp_path, engine, reward=raising, groups_wanted=1, max_attempts=1) as parts:
        while not parts.coordinator.counts().dropped:
            await asyncio.sleep(0.01)
    letter = letters_of(tmp_path)[0]
    assert letter.message.endswith("the reward raised KeyError: 'no such environment'.")
    assert letter.traceback is not None
    assert "in raising" in letter.traceback
    assert letter.samples is None
    assert letter.payload_ref is not None
    with Pool.open(tmp_path / "pool") as pool:
        group = pool.read_group(letter.payload_ref)
    (sample,) = decode_group(group.header, group.columns)
    assert [sample.index] == letter.sample_indices
    assert (sample.prompt, sample.response_length, sample.reward) == ("prompt 0", 6, None)


class Breaking(fractions.Fraction):
    """A number that can't be turned into a plain one."""

    def __float__(self) -> float:
        raise ArithmeticError("no plain number")


async def test_what_raises_after_the_hooks_is_set_aside_with_its_trace_and_counted(
    tmp_path: Path, engine: StandinEngine
) -> None:
    async def odd(args: Any, sample: Sample) -> Any:  # noqa: ARG001
        return Breaking(1, 2) if sample.group_index == 0 else 1.0

    async with stream(tmp_path, engine, reward=odd, groups_wanted=2) as parts:
        await parts.until_pending(2)
        await settled(parts)
        assert parts.coordinator.counts().dropped == {"unexpected_error": 1}
        assert parts.producer.stats().failed_samples["unexpected_error"] >= 2
    letter = letters_of(tmp_path)[0]
    assert (letter.error, letter.message) == ("ArithmeticError", "no plain number")
    assert letter.traceback is not None
    assert "in __float__" in letter.traceback


async def test_a_failure_that_a_second_attempt_repairs_leaves_a_letter_and_drops_nothing(
    tmp_path: Path, engine: StandinEngine
) -> None:
    seen: list[int | None] = []

    async def flaky(args: Any, sample: Sample) -> Any:  # noqa: ARG001
        seen.append(sample.index)
        return None if sample.index == 0 and seen.count(0) == 1 else 1.0

    async with stream(tmp_path, engine, reward=flaky, groups_wanted=2) as parts:
        await parts.until_pending(2)
        await settled(parts)
        assert parts.coordinator.counts().dropped == {}
    assert {(letter.group_index, letter.attempt) for letter in letters_of(tmp_path)} == {(0, 1)}


async def cancelled(args: Any, sample: Sample) -> float:  # noqa: ARG001
    raise asyncio.CancelledError


async def test_a_reward_that_raises_cancellation_never_leaves_a_sample_without_reward(
    tmp_path: Path, engine: StandinEngine
) -> None:
    async with stream(tmp_path, engine, reward=cancelled, groups_wanted=1, max_attempts=1) as parts:
        while not parts.coordinator.counts().dropped:
            await asyncio.sleep(0.01)
            assert parts.coordinator.counts().pending == 0
        assert set(parts.coordinator.counts().dropped) == {"reward_raised"}


@pytest.mark.parametrize("value", [np.float64(0.5), np.float32(0.5), np.int64(1), 1])
async def test_rewards_may_be_numbers_of_other_libraries(tmp_path: Path, engine: StandinEngine, value: Any) -> None:
    async with stream(tmp_path, engine, reward=returning(value), groups_wanted=1) as parts:
        await parts.until_pending(1)
        (group,) = await parts.coordinator.wait_for_groups(1, 1) or []
        assert group.summary.rewards == [float(value)] * 2


async def test_a_group_that_cannot_be_stored_is_set_aside_alone(tmp_path: Path, engine: StandinEngine) -> None:
    async def annotating(args: Any, sample: Sample) -> float:  # noqa: ARG001
        if sample.group_index == 0:
            sample.metadata["judge"] = object()
        return 1.0

    async with stream(tmp_path, engine, reward=annotating, groups_wanted=3) as parts:
        await parts.until_pending(3)
        await settled(parts)
        assert parts.coordinator.counts().dropped == {"unstorable": 1}
    letter = letters_of(tmp_path)[0]
    assert letter.payload_ref is None
    assert letter.samples is not None
    assert letter.samples[0]["metadata"]["judge"]["type"] == "builtins.object"
    assert len(letter.samples[0]["tokens"]) > 6


async def test_a_prompt_that_the_chat_template_refuses_is_set_aside_alone(
    tmp_path: Path, engine: StandinEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_the_first(_: CharTokenizer, conversation: list[dict[str, Any]], **__: Any) -> str:
        if conversation[0]["content"] == "prompt 0":
            raise TemplateError("roles must alternate")
        return "text"

    monkeypatch.setattr(CharTokenizer, "apply_chat_template", refuse_the_first)
    async with stream(tmp_path, engine, groups_wanted=3, apply_chat_template=True) as parts:
        await parts.until_pending(3)
        await settled(parts)
        assert parts.coordinator.counts().dropped == {"sample": 1}


def disk_that_waits(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """(set when groups are to be written, to be set for them to be written)."""
    asked, free = threading.Event(), threading.Event()
    publish = Pool.publish_groups

    def wait_for_disk(*arguments: Any, **names: Any) -> Any:
        asked.set()
        assert free.wait(20)
        return publish(*arguments, **names)

    monkeypatch.setattr(Pool, "publish_groups", wait_for_disk)
    return asked, free


async def test_a_disk_that_fills_while_stopping_ends_the_producer_with_its_error(
    tmp_path: Path, engine: StandinEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    def full(*_: Any, **__: Any) -> Any:
        asked.set()
        time.sleep(0.2)
        raise StorageError("the file system is full")

    monkeypatch.setattr(Pool, "publish_groups", full)
    async with stream(tmp_path, engine, groups_wanted=1) as parts:
        assert await asyncio.to_thread(asked.wait, 10)
        parts.producer.stop()
        with pytest.raises(StorageError, match="full"):
            await asyncio.wait_for(parts.running, 5)


async def test_a_group_that_is_being_written_when_the_producer_stops_is_accepted(
    tmp_path: Path, engine: StandinEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, free = disk_that_waits(monkeypatch)
    async with stream(tmp_path, engine, groups_wanted=1) as parts:
        assert await asyncio.to_thread(asked.wait, 10)
        await asyncio.sleep(0.15)  # the leases' loop forgets what has been handed to the writer
        parts.producer.stop()
        await asyncio.wait([parts.running], timeout=0.15)
        assert not parts.running.done()
        free.set()
        await asyncio.wait_for(parts.running, 10)
        assert (parts.coordinator.counts().pending, parts.coordinator.counts().in_flight) == (1, 0)


async def test_a_producer_whose_writer_has_no_room_is_blocked_and_loses_nothing(
    tmp_path: Path, engine: StandinEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, free = disk_that_waits(monkeypatch)
    async with stream(tmp_path, engine, write_limits=WriteLimits(waiting_groups=1)) as parts:
        async with asyncio.timeout(20):
            # One group is being written, four more fill the producer.
            while (
                not asked.is_set()
                or parts.coordinator.counts().in_flight < 5
                or sum(held.is_outgoing for held in parts.producer._held) < 5
            ):
                await asyncio.sleep(0.01)
            before = parts.producer.stats().blocked_s
            while parts.producer.stats().blocked_s < before + 0.05:
                await asyncio.sleep(0.01)
            counts = parts.coordinator.counts()
            assert (counts.pending, counts.in_flight, parts.producer.stats().in_flight_requests) == (0, 5, 0)
        free.set()
        await parts.until_pending(8)
        assert parts.coordinator.counts().dropped == {}
        assert parts.queue.released == []
        assert parts.coordinator.identity().holds


async def test_finished_groups_that_wait_for_room_are_published_when_the_producer_stops(
    tmp_path: Path, engine: StandinEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = threading.Event()
    publish = Pool.publish_groups

    def wait_for_disk(*arguments: Any, **names: Any) -> Any:
        assert free.wait(20)
        return publish(*arguments, **names)

    monkeypatch.setattr(Pool, "publish_groups", wait_for_disk)
    async with stream(tmp_path, engine, write_limits=WriteLimits(waiting_groups=1)) as parts:
        async with asyncio.timeout(20):
            while (
                parts.coordinator.counts().in_flight < 5 or sum(held.is_outgoing for held in parts.producer._held) < 5
            ):
                await asyncio.sleep(0.01)
        parts.producer.stop()
        free.set()
        await asyncio.wait_for(parts.running, 20)
        assert parts.queue.released == []
        assert parts.coordinator.counts().pending == 5


async def test_a_full_disk_is_waited_for_and_loses_nothing(
    tmp_path: Path, engine: StandinEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = Pool.publish_groups
    failures = [DiskFullError("the file system is full")] * 3

    def full_at_first(*arguments: Any, **names: Any) -> Any:
        if failures:
            raise failures.pop()
        return publish(*arguments, **names)

    monkeypatch.setattr(Pool, "publish_groups", full_at_first)
    async with stream(tmp_path, engine, groups_wanted=3, write_limits=WriteLimits(full_disk_retry_s=0.01)) as parts:
        await parts.until_pending(3)
        counts = parts.coordinator.counts()
        assert (failures, counts.generated, counts.dropped, parts.queue.released) == ([], 3, {}, [])


async def test_a_producer_that_stops_does_not_wait_for_a_full_disk(
    tmp_path: Path, engine: StandinEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    def full(*_: Any, **__: Any) -> Any:
        asked.set()
        raise DiskFullError("the file system is full")

    monkeypatch.setattr(Pool, "publish_groups", full)
    async with stream(tmp_path, engine, groups_wanted=1, write_limits=WriteLimits(full_disk_retry_s=0.01)) as parts:
        await asked.wait()
        assert not parts.running.done()
        parts.producer.stop()
        with pytest.raises(DiskFullError):
            await asyncio.wait_for(parts.running, 10)


async def test_a_dropped_connection_is_retried_and_nothing_is_lost(tmp_path: Path, engine: StandinEngine) -> None:
    engine.faults.num_dropped_connections = 1
    async with stream(tmp_path, engine, groups_wanted=3) as parts:
        await parts.until_pending(3)
        assert parts.coordinator.counts().dropped == {}
        assert len(parts.queue.released) + len(parts.queue.yielded) == 1


async def test_null_log_probabilities_never_reach_a_batch(tmp_path: Path, engine: StandinEngine) -> None:
    engine.faults.num_null_log_probs = 4
    async with stream(tmp_path, engine, groups_wanted=3, max_attempts=1) as parts:
        await parts.until_pending(3)
        await settled(parts)
        dropped = parts.coordinator.counts().dropped["engine"]
    assert dropped >= 1
    assert len({letter.group_index for letter in letters_of(tmp_path) if letter.reason == "engine"}) == dropped


async def test_stop_gives_unfinished_groups_back(tmp_path: Path, engine: StandinEngine) -> None:
    engine.faults.step_s = 0.2
    async with stream(tmp_path, engine, response_tokens=60) as parts:
        await running_requests(parts, 8)
        parts.producer.stop()
        await asyncio.wait_for(parts.running, 20)
        identity = parts.coordinator.identity()
        assert identity.in_flight == 4
        assert identity.holds
        assert parts.queue.released == ["producer stopped"] * 4


async def test_a_lost_lease_stops_the_work_and_its_result_is_refused(tmp_path: Path, engine: StandinEngine) -> None:
    engine.faults.step_s = 0.1
    async with stream(tmp_path, engine, groups_wanted=2, response_tokens=20, lease_seconds=0.3) as parts:
        await running_requests(parts, 4)
        for held in list(parts.coordinator._leases):
            parts.coordinator.release(held.group_index, held.lease, "taken away")
        await parts.until_pending(2)
        identity = parts.coordinator.identity()
        assert (identity.pending, identity.in_flight) == (2, 0)
        assert json.dumps(identity.dropped) == "{}"


class ScoringTeacher:
    """Says of each token its position."""

    async def score(self, sample: Sample) -> None:
        sample.teacher_log_probs = [-float(position) for position in range(sample.response_length)]


async def test_a_teacher_scores_each_sample_before_it_is_published(tmp_path: Path, engine: StandinEngine) -> None:
    needs = EnqueueRequirements(teacher=True)
    async with stream(tmp_path, engine, teacher=ScoringTeacher(), needs=needs, groups_wanted=1) as parts:
        await parts.until_pending(1)
        (accepted,) = await parts.coordinator.wait_for_groups(1, 5.0) or []
        stored = parts.pool.read_group(accepted.ref)
        for sample in decode_group(stored.header, stored.columns):
            assert list(sample.teacher_log_probs or []) == [-float(number) for number in range(sample.response_length)]


class Records:
    """Samples from their prompts, without an engine."""

    async def generate(self, engine: Any, sample: Sample, sampling: SamplingSettings, **_: Any) -> None:  # noqa: ARG002
        assert engine is None
        sample.tokens, sample.response_length, sample.loss_mask = [1, 2, 3, 4], 3, [1, 0, 1]
        sample.status = Sample.Status.COMPLETED


async def test_records_are_published_without_an_engine_and_planned_without_an_age(
    tmp_path: Path, engine: StandinEngine
) -> None:
    needs = EnqueueRequirements(sampled=False)
    async with stream(tmp_path, engine, generator=Records(), needs=needs, groups_wanted=4) as parts:
        await parts.until_pending(4)
        groups = await parts.coordinator.wait_for_groups(4, 5.0) or []
        plan = plan_batch(groups, PLAN, branch="b", rollout_id=0, policy_version=3)
        assert {(sample.age_versions, sample.mask_sum) for sample in plan.samples} == {(0, 2.0)}
        assert (await parts.client.metrics()).num_running == 0


async def test_groups_of_an_engine_that_is_replaced_go_back_as_often_as_it_fails_and_none_is_dropped(
    tmp_path: Path, engine: StandinEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.serving_engines.GIVE_BACK_S", 0.02)
    engine.faults.dead = True
    async with stream(tmp_path, engine, replaces_engines=True, max_attempts=1) as parts:
        assert await parts.producer.gate.engines.suspects() == [engine.address]
        while len(parts.queue.released) < 12:
            await asyncio.sleep(0.01)
        parts.producer.gate.serve_only([])
        engine.start_anew()
        parts.producer.gate.resume(1, [engine.address])
        await parts.until_pending(4)
        assert parts.coordinator.counts().dropped == {}
        assert parts.producer.stats().failed_samples == {}
