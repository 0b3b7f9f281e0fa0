"""The coordinator's process, without Ray around it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pipeline.actors.coordinator import CoordinatorActor
from pipeline.actors.settings import encode_settings
from pipeline.coordinator import TAKE_OVER_S
from pipeline.coordinator_config import CoordinatorConfig
from pipeline.messages import LeaseReply, LeaseStatus, QueueCounts, decode, encode
from recovery.commit import QueueState
from tests.pipeline.mini_stream import write_prompts
from vime.errors import StorageError
from vime.settings.parse import parse_settings


def actor(folder: Path, lease_seconds: float = 60) -> CoordinatorActor:
    (folder / "run" / "rollout").mkdir(parents=True, exist_ok=True)
    settings = parse_settings(
        [
            *("--prompt-data", str(write_prompts(folder)), "--save", str(folder / "run"), "--rollout-queue-online-gc"),
            *("--rollout-queue-segment-mib", "1", "--rollout-data-transport", "straw"),
        ]
    )
    config = CoordinatorConfig("a", [], 8, 8, lease_seconds, online_gc=True)
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
