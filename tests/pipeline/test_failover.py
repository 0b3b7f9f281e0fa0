"""A producer goes on when another coordinator takes over: what it has made is neither lost nor made again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.coordinator import Coordinator, open_coordinator
from pipeline.coordinator_config import CoordinatorConfig
from storage.pool import Pool
from storage.queue_types import Stage
from tests.pipeline.stream_parts import Parts, stream
from tests.support.standin_engine import StandinEngine
from vime.data.prompts import PromptSource
from vime.utils.types import Sample


@pytest.fixture
def engine() -> Iterator[StandinEngine]:
    with StandinEngine() as engine:
        yield engine


def successor(folder: Path, groups_wanted: int) -> Coordinator:
    """What Ray starts when the coordinator's process has died."""
    return open_coordinator(
        open_pool=lambda: Pool.open(folder / "pool"),
        source=PromptSource(folder / "prompts.jsonl", n_samples_per_prompt=2),
        owner="test",
        config=CoordinatorConfig("branch", [], groups_wanted, 8, lease_seconds=60.0),
    )


def fail_over(parts: Parts, folder: Path, groups_wanted: int) -> None:
    parts.queue.coordinator.close()
    parts.queue.coordinator = parts.coordinator = successor(folder, groups_wanted)


async def pending(parts: Parts, count: int) -> None:
    """Until so many groups are accepted, by whichever coordinator."""
    async with asyncio.timeout(20):
        while parts.coordinator.counts().pending < count:
            if parts.running.done():
                parts.running.result()
            await asyncio.sleep(0.01)


def fail_over_at_first(parts: Parts, folder: Path, groups_wanted: int, call: str) -> list[Any]:
    """Another coordinator takes over when the producer makes this call first; the arguments of each, as they come."""
    go_on, calls = getattr(parts.queue, call), []

    async def after_failover(argument: Any) -> Any:
        calls.append(argument)
        if len(calls) == 1:
            fail_over(parts, folder, groups_wanted)
        return await go_on(argument)

    setattr(parts.queue, call, after_failover)
    return calls


async def busy(parts: Parts, requests: int) -> None:
    async with asyncio.timeout(20):
        while (await parts.client.metrics()).num_running < requests:
            await asyncio.sleep(0.01)


async def test_groups_that_are_being_generated_at_a_failover_are_accepted_and_not_generated_again(
    tmp_path: Path, engine: StandinEngine
) -> None:
    engine.faults.step_s = 0.02
    async with stream(tmp_path, engine, groups_wanted=4, response_tokens=60) as parts:
        await busy(parts, 8)
        fail_over(parts, tmp_path, 4)
        await pending(parts, 4)
        assert engine.num_served == 8
        assert parts.producer.stats().groups_stale == 0
        assert parts.queue.released == []


async def test_groups_that_are_published_but_not_accepted_at_a_failover_are_published_for_their_new_leases(
    tmp_path: Path, engine: StandinEngine
) -> None:
    async with stream(tmp_path, engine, groups_wanted=4, paused=True) as parts:
        calls = fail_over_at_first(parts, tmp_path, 4, "accept")
        parts.producer.gate.resume(1)
        await pending(parts, 4)
        assert engine.num_served == 8
        assert len(calls) > 1
        async with asyncio.timeout(20):  # the producer hears of it after the queue's own count
            while (stats := parts.producer.stats()).groups_published < 4:
                await asyncio.sleep(0.01)
        assert stats.groups_stale == 0


async def test_an_unfinished_group_that_goes_back_at_a_failover_keeps_its_samples(
    tmp_path: Path, engine: StandinEngine
) -> None:
    num_rewards = 0

    async def fails_once(args: Any, sample: Sample) -> float:  # noqa: ARG001 - the documented hook signature
        nonlocal num_rewards
        num_rewards += 1
        if num_rewards == 1:
            raise ValueError("once")
        return 1.0

    async with stream(tmp_path, engine, reward=fails_once, groups_wanted=1, paused=True) as parts:
        calls = fail_over_at_first(parts, tmp_path, 1, "yield_groups")
        parts.producer.gate.resume(1)
        await pending(parts, 1)
        assert len(calls) == 2
        assert parts.queue.yielded[-1].stage is Stage.PARTIAL
        assert engine.num_served == 3, "the member that was rewarded isn't generated again"


async def test_failover_after_failover_loses_nothing(tmp_path: Path, engine: StandinEngine) -> None:
    engine.faults.step_s = 0.02
    async with stream(tmp_path, engine, groups_wanted=8, response_tokens=60) as parts:
        await busy(parts, 8)
        for _ in range(3):
            epoch = parts.coordinator.epoch
            fail_over(parts, tmp_path, 8)
            async with asyncio.timeout(20):
                while parts.producer._held.epoch == epoch:
                    await asyncio.sleep(0.01)
        await pending(parts, 8)
        assert engine.num_served == 16
        assert parts.coordinator.counts().generated == 8
