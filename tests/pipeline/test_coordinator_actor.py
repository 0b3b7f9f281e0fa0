"""The coordinator's process, without Ray around it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pipeline.actors.coordinator import CoordinatorActor
from pipeline.actors.settings import encode_settings
from pipeline.coordinator import TAKE_OVER_S
from pipeline.coordinator_config import CoordinatorConfig
from pipeline.messages import AcceptReply, LeaseReply, LeaseStatus, QueueCounts, decode, encode
from recovery.commit import QueueState
from tests.pipeline.mini_stream import write_prompts
from tests.pipeline.test_coordinator import published
from vime.errors import StorageError
from vime.settings.parse import parse_settings


def actor(folder: Path, lease_seconds: float = 60, **rules: Any) -> CoordinatorActor:
    (folder / "run" / "rollout").mkdir(parents=True, exist_ok=True)
    settings = parse_settings(
        [
            *("--prompt-data", str(write_prompts(folder)), "--save", str(folder / "run"), "--rollout-queue-online-gc"),
            *("--rollout-queue-segment-mib", "1", "--rollout-data-transport", "straw"),
        ]
    )
    config = CoordinatorConfig("a", [], 8, 8, lease_seconds, online_gc=True, **rules)
    return CoordinatorActor(encode_settings(settings), encode(config))


async def counts(coordinator: CoordinatorActor) -> QueueCounts:
    return decode(await coordinator.counts(), QueueCounts)


async def test_the_process_ends_expired_leases_though_no_producer_asks_again(tmp_path: Path) -> None:
    coordinator = actor(tmp_path, lease_seconds=0.2)
    reply = decode(await coordinator.lease("w", 2, 1), LeaseReply)
    assert (reply.status, len(reply.work)) == (LeaseStatus.WORK, 2)
    pool = tmp_path / "run" / "rollout_data" / "pool"
    async with asyncio.timeout(20):
        while not any(b'"Expired"' in path.read_bytes() for path in pool.glob("queues/*/control/journal.log")):
            await asyncio.sleep(0.01)
    await coordinator.close()


async def test_a_commit_is_passed_on_with_what_it_releases(tmp_path: Path) -> None:
    coordinator = actor(tmp_path)
    state = await coordinator.queue_state()
    assert decode(state, QueueState).accepted == []
    await coordinator.rotate(state, [])
    assert (await counts(coordinator)).notices == []
    await coordinator.close()


async def test_a_failure_of_the_housekeeping_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise StorageError("end expired leases: the disk is gone.")

    coordinator = actor(tmp_path, lease_seconds=0.2)
    await counts(coordinator)
    monkeypatch.setattr("pipeline.coordinator.Coordinator.sweep", fail)
    with pytest.raises(StorageError, match="the disk is gone"):
        await asyncio.wait_for(ask_for_ever(coordinator), 20)
    await coordinator.close()


async def ask_for_ever(coordinator: CoordinatorActor) -> None:
    while True:
        await counts(coordinator)
        await asyncio.sleep(0.01)


async def test_a_successor_knows_that_the_next_batch_is_made_under_the_same_version(tmp_path: Path) -> None:
    first = actor(tmp_path, max_staleness=0)
    await first.training_completed(0, 5, await accepted(tmp_path, first, 5))
    await first.keep_version(5)
    await first.close()
    second = actor(tmp_path, max_staleness=0)
    await asyncio.sleep(TAKE_OVER_S)
    positions = await accepted(tmp_path, second, 5)
    await second.training_completed(1, 5, positions)
    await second.close()
    third = actor(tmp_path, max_staleness=0)
    await asyncio.sleep(TAKE_OVER_S)
    reply = decode(await third.lease("w", 1, 5), LeaseReply)
    assert reply.status is LeaseStatus.BACKPRESSURE, "what was kept for the batch before says nothing of this one"
    await third.close()


async def accepted(folder: Path, coordinator: CoordinatorActor, version: int) -> list[int]:
    """Lease a group under a version and have it accepted; its position."""
    reply = decode(await coordinator.lease("w", 1, version), LeaseReply)
    request = published(folder / "run" / "rollout_data", reply.work[0], version)
    (answer,) = decode(await coordinator.accept(encode([request])), list[AcceptReply])
    assert answer.position is not None
    return [answer.position]


async def test_a_successor_goes_on_with_the_branch_that_was_begun_last(tmp_path: Path) -> None:
    first = actor(tmp_path)
    await first.begin_branch(encode(CoordinatorConfig("b", [], 0, 8, 60, online_gc=True, session="a")))
    await first.close()
    successor = actor(tmp_path)
    await asyncio.sleep(TAKE_OVER_S)
    reply = decode(await successor.lease("w", 1, 1), LeaseReply)
    assert reply.status is LeaseStatus.DONE, "the new branch wants no group, the first one wants 8"
    assert await successor.epoch() == 2
    await successor.close()
