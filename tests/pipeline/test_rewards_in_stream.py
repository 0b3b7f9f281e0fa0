"""Rewards beside the stream: a slow judge holds nothing up, and a run without a single reward ends."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.batch_wait import wait_for_batch
from pipeline.failed_fraction import check_failed_fraction, check_some_accepted
from pipeline.messages import QueueCounts
from pipeline.publisher import WeightPublisher
from pipeline.weight_transports.group import GroupTransport
from storage.dead_letters import letters_folder, read_letters
from tests.pipeline.publication_rig import Source, Trainer
from tests.pipeline.stream_parts import Parts, stream
from tests.pipeline.test_batch_wait import PartsSource
from tests.support.standin_engine import StandinEngine
from vime.errors import TooManyFailuresError
from vime.rollout.rewards import Rewards
from vime.settings.parse import parse_settings
from vime.utils.types import Sample

pytestmark = pytest.mark.usefixtures("quick_retries")
judging = threading.Semaphore(0)
verdict = threading.Event()
SLOW_S = 60.0
PROMPT_S = 10.0
"""Far less than the judge takes, and enough for a busy machine."""


async def blocking_judge(args: Any, sample: Sample) -> float:  # noqa: ARG001
    """A judge whose client blocks its event loop."""
    judging.release()
    verdict.wait(SLOW_S)
    return 1.0


async def raising(args: Any, sample: Sample) -> float:  # noqa: ARG001
    raise KeyError("no such environment")


class Admission:
    """The producer of a stream as a publisher sees it."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def pause_admission(self) -> None:
        self._parts.producer.gate.pause()

    async def resume_admission(self, policy_version: int, serving: list[str]) -> None:
        self._parts.producer.gate.resume(policy_version, serving)


async def test_a_judge_that_blocks_delays_neither_a_publication_nor_the_end(tmp_path: Path) -> None:
    verdict.clear()
    words = ["--custom-rm-path", f"{__name__}.blocking_judge", "--reward-timeout", str(2 * SLOW_S)]
    source = Source(Trainer())
    transport = GroupTransport(source, streams=False, timeout_s=SLOW_S)
    with StandinEngine(required_names=frozenset("ab")) as engine:
        engine.version = "1"
        async with (
            Rewards(parse_settings(words)) as rewards,
            stream(tmp_path, engine, reward=rewards.of_sample) as parts,
        ):
            assert await asyncio.to_thread(judging.acquire, timeout=30), "no sample reached the judge"
            started = time.monotonic()
            publisher = WeightPublisher(
                [parts.client], transport, Admission(parts), start_version=1, flush_interval=1, timeout_s=SLOW_S
            )
            assert (await publisher.publish()).version == 2
            parts.producer.stop()
            await asyncio.wait_for(parts.running, PROMPT_S)
            assert time.monotonic() - started < PROMPT_S
            assert parts.queue.released
            assert set(parts.queue.released) == {"producer stopped"}
        verdict.set()
    source.rank.close()


async def test_a_run_whose_every_group_fails_ends_with_the_count_and_the_reasons(
    tmp_path: Path, engine: StandinEngine
) -> None:
    def check(counts: QueueCounts) -> None:
        check_some_accepted(counts.dropped, counts.trained + counts.pending, batch=4, run=tmp_path)

    async with stream(tmp_path, engine, reward=raising, max_attempts=1) as parts:
        source = PartsSource(parts)
        wait = functools.partial(wait_for_batch, source, source.stats, 4, stall_timeout_s=60.0, interval_s=0.05)
        with pytest.raises(TooManyFailuresError, match=r"^0 of (1[6-9]|[2-9]\d) groups were accepted\.") as caught:
            await wait(report=lambda _: None, check=check, stop_asked=lambda: False)
    assert "reward_raised (" in caught.value.message


async def fails_for(args: Any, sample: Sample, groups: set[int]) -> float:  # noqa: ARG001
    if sample.group_index in groups and (sample.index or 0) % 2:
        raise KeyError("no such environment")
    return float((sample.index or 0) % 2)


async def test_one_sample_that_fails_in_many_costs_its_group_and_the_run_goes_on(
    tmp_path: Path, engine: StandinEngine
) -> None:
    reward = functools.partial(fails_for, groups={3})
    async with stream(tmp_path, engine, reward=reward, max_attempts=1, groups_wanted=24, max_groups=24) as parts:
        await parts.until_pending(24)
        counts = parts.coordinator.counts()
    assert counts.dropped == {"reward_raised": 1}
    check_failed_fraction(counts.dropped, counts.generated, allowed=0.02, run=tmp_path)
    letters, _ = read_letters(letters_folder(tmp_path))
    assert [letter.sample_indices for letter in letters] == [[7]]


async def test_a_run_most_of_whose_samples_fail_stops_with_a_summary(tmp_path: Path, engine: StandinEngine) -> None:
    reward = functools.partial(fails_for, groups={number for number in range(40) if number % 5 >= 2})
    async with stream(tmp_path, engine, reward=reward, max_attempts=1, groups_wanted=12, max_groups=12) as parts:
        await parts.until_pending(12)
        counts = parts.coordinator.counts()
    with pytest.raises(TooManyFailuresError, match=r"reward_raised \(\d+\)"):
        check_failed_fraction(counts.dropped, counts.generated, allowed=0.2, run=tmp_path)
