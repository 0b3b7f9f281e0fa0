"""The producer on a queue in memory: the same rules, and nothing is lost to make room."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pipeline.group_start import read_start
from storage.columns import decode_group, encode_group
from storage.queue_types import GroupReturn, Stage
from storage.refs import GroupRef
from tests.pipeline.stream_parts import Parts, stream
from tests.pipeline.test_queue_data_source import respond
from tests.support.standin_engine import StandinEngine
from vime.errors import StorageError
from vime.utils.types import Sample


def samples(parts: Parts, ref: GroupRef) -> list[Sample]:
    group = parts.pool.read_group(ref)
    return decode_group(group.header, group.columns)


async def test_a_full_queue_makes_the_producer_wait_and_keeps_every_group_readable(
    tmp_path: Path, engine: StandinEngine
) -> None:
    async with stream(tmp_path, engine, max_groups=5, in_memory=True) as parts:
        await parts.until_pending(5)
        await asyncio.sleep(0.3)
        counts = parts.coordinator.counts()
        assert (counts.pending, counts.in_flight, counts.dropped) == (5, 0, {})
        assert counts.backpressured
        waiting = await parts.coordinator.wait_for_groups(5, 1) or []
        assert [samples(parts, group.ref)[0].group_index for group in waiting] == [g.group_index for g in waiting]


async def test_training_makes_room_and_releases_what_it_trained(tmp_path: Path, engine: StandinEngine) -> None:
    async with stream(tmp_path, engine, max_groups=3, in_memory=True) as parts:
        await parts.until_pending(3)
        first = await parts.coordinator.wait_for_groups(3, 1) or []
        parts.coordinator.training_completed(0, 1, [group.position for group in first])
        with pytest.raises(StorageError, match="is not there"):
            samples(parts, first[0].ref)
        await parts.until_pending(3)
        assert parts.coordinator.identity().holds
        assert parts.coordinator.counts().trained == 3


async def test_a_returned_group_keeps_its_finished_members_and_makes_the_others_anew(
    tmp_path: Path, engine: StandinEngine
) -> None:
    async with stream(tmp_path, engine, groups_wanted=1, in_memory=True, paused=True) as parts:
        (work,) = parts.coordinator.lease("custom", 1).work
        done, cut = read_start(work, parts.pool, 2)
        respond(done, version=1)
        respond(cut, version=1, finished=False)
        (ref,) = parts.pool.publish_groups([(encode_group([done, cut]), work.lease)], submission_id="returned")
        assert parts.coordinator.yield_groups([GroupReturn(work.lease, ref, Stage.PARTIAL, 1)]) == [True]
        parts.producer.gate.resume(1)
        await parts.until_pending(1)
        (group,) = await parts.coordinator.wait_for_groups(1, 1) or []
        kept, made = samples(parts, group.ref)
        assert (kept.tokens, kept.reward) == (done.tokens, 1.0)
        assert made.status is Sample.Status.COMPLETED or made.status is Sample.Status.TRUNCATED
        assert made.response_length == 6
        assert made.index == cut.index


async def test_groups_of_a_stopped_producer_go_back_unfinished(tmp_path: Path, engine: StandinEngine) -> None:
    engine.faults.step_s = 0.2
    async with stream(tmp_path, engine, response_tokens=60, in_memory=True) as parts:
        while parts.coordinator.counts().in_flight < 4:
            await asyncio.sleep(0.01)
        parts.producer.stop()
        await asyncio.wait([parts.running], timeout=20)
        assert parts.queue.released == ["producer stopped"] * 4
        assert parts.coordinator.identity().holds
