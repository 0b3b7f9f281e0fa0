"""The trainer's wait for groups: a stall ends it with what both sides wait for; slow progress doesn't."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pipeline.batch_wait import WAITING_BATCHES_VARIABLE, groups_to_wait_for, wait_for_batch
from pipeline.messages import ProducerStats, QueueCounts
from pipeline.stall import StallWatch
from storage.queue_types import AcceptedGroup
from tests.pipeline.stream_parts import Parts, stream
from tests.support.standin_engine import StandinEngine
from vime.errors import SettingsError, StalledError, TooManyFailuresError
from vime.utils.types import Sample

COUNTS = QueueCounts(generated=5, trained=0, pending=2, in_flight=3, dropped={}, fresh=7, backpressured=False)
STATS = ProducerStats(0, 0, 0, 0, 0, 0, in_flight_requests=6, idle_s=0.0, blocked_s=0.0, wall_s=0.0)


class PartsSource:
    """The wait's view of a stream in this process."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def wait_for_groups(self, count: int, timeout_s: float) -> list[AcceptedGroup] | None:
        return await self._parts.coordinator.wait_for_groups(count, timeout_s)

    async def counts(self) -> QueueCounts:
        return self._parts.coordinator.counts()

    async def stats(self) -> list[ProducerStats]:
        return [self._parts.producer.stats()]


async def never(args: Any, sample: Sample) -> float:  # noqa: ARG001 - the documented hook signature
    await asyncio.Event().wait()
    return 0.0


async def wait(parts: Parts, batch: int, timeout_s: float, reports: list[str] | None = None) -> Any:
    source = PartsSource(parts)
    return await wait_for_batch(
        source,
        source.stats,
        batch,
        stall_timeout_s=timeout_s,
        report=(reports if reports is not None else []).append,
        check=lambda _: None,
        stop_asked=lambda: False,
        interval_s=0.05,
    )


async def test_stream_whose_reward_never_answers_stalls_and_says_so(tmp_path: Path) -> None:
    reports: list[str] = []
    with StandinEngine() as engine, pytest.raises(StalledError) as caught:
        async with stream(tmp_path, engine, reward=never, reward_timeout_s=60.0) as parts:
            await wait(parts, 4, 3.0, reports)
    assert "--stall-timeout is 3. The trainer waits for 4 groups, 0 are there." in caught.value.message
    assert "The producers have 4 groups in flight but no request at an engine" in caught.value.message
    assert "--stall-timeout" in caught.value.next_step
    assert "for 4 groups (0 are there)" in reports[0]


async def test_stream_that_gives_groups_does_not_stall(tmp_path: Path) -> None:
    with StandinEngine() as engine:
        async with stream(tmp_path, engine) as parts:
            assert len(await wait(parts, 4, 20.0)) >= 4


async def test_asked_to_stop_ends_the_wait_without_groups() -> None:
    assert await wait_for_batch(
        Silent(), Silent().stats, 4, stall_timeout_s=9, report=str, check=lambda _: None, stop_asked=lambda: True,
        interval_s=0.01,
    ) is None  # fmt: skip


async def test_refused_counts_end_the_wait() -> None:
    def refuse(_counts: QueueCounts) -> None:
        raise TooManyFailuresError("too many")

    with pytest.raises(TooManyFailuresError):
        await wait_for_batch(
            Silent(),
            Silent().stats,
            4,
            stall_timeout_s=9,
            report=str,
            check=refuse,
            stop_asked=lambda: False,
            interval_s=0.01,
        )


class Silent:
    """Nothing ever arrives."""

    async def wait_for_groups(self, count: int, timeout_s: float) -> list[AcceptedGroup] | None:  # noqa: ARG002
        await asyncio.sleep(timeout_s)
        return None

    async def counts(self) -> QueueCounts:
        return COUNTS

    async def stats(self) -> list[ProducerStats]:
        return [STATS]


def test_each_accepted_group_starts_the_clock_anew() -> None:
    watch = StallWatch(10.0, started_s=0.0)
    watch.check(COUNTS, [STATS], 4, 9.0)
    watch.check(replace_pending(3), [STATS], 4, 9.5)
    watch.check(replace_pending(3), [STATS], 4, 19.0)
    with pytest.raises(StalledError):
        watch.check(replace_pending(3), [STATS], 4, 19.6)


def replace_pending(pending: int) -> QueueCounts:
    return QueueCounts(5, 0, pending, 2, {}, 7, False)


def test_groups_that_are_set_aside_are_no_arrival() -> None:
    watch = StallWatch(10.0, started_s=0.0)
    watch.check(COUNTS, [STATS], 4, 9.0)
    with pytest.raises(StalledError):
        watch.check(QueueCounts(9, 0, 2, 3, {"reward": 4}, 3, False), [STATS], 4, 10.5)


@pytest.mark.parametrize(
    ("in_flight", "requests", "backpressured", "words"),
    [
        (3, 6, False, "wait for the engines: 6 requests of 3 groups are unanswered"),
        (3, 0, False, "wait for the reward function"),
        (0, 0, True, "the queue hands out no more groups"),
        (0, 0, False, "7 prompts wait to be handed out"),
    ],
)
def test_the_message_names_what_producers_wait_for(
    in_flight: int, requests: int, backpressured: bool, words: str
) -> None:
    counts = QueueCounts(5, 0, 2, in_flight, {}, 7, backpressured)
    stats = ProducerStats(0, 0, 0, 0, 0, 0, requests, 0.0, 0.0, 0.0)
    with pytest.raises(StalledError, match=words):
        StallWatch(1.0, 0.0).check(counts, [stats], 4, 2.0)


def test_one_batch_is_waited_for_unless_an_experiment_wants_old_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    assert groups_to_wait_for(32, 10) == 32
    monkeypatch.setenv(WAITING_BATCHES_VARIABLE, "3")
    assert [groups_to_wait_for(32, left) for left in (10, 4, 2, 1)] == [128, 128, 64, 32]


def test_a_wrong_number_of_waiting_batches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WAITING_BATCHES_VARIABLE, "some")
    with pytest.raises(SettingsError, match=r"VIME_TEST_WAITING_BATCHES is 'some', allowed: 0, 1, 2"):
        groups_to_wait_for(32, 10)
