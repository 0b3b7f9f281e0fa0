"""Runs of fewer steps than may be generated ahead come to their end."""

import asyncio
from pathlib import Path

import pytest

from pipeline.messages import LeaseStatus
from tests.pipeline.stream_parts import stream
from tests.support.standin_engine import StandinEngine

BATCH, DEPTH = 2, 4


@pytest.mark.parametrize("total", [1, 2, 3])
async def test_runs_shorter_than_the_asynchronous_depth_end(tmp_path: Path, total: int) -> None:
    with StandinEngine() as engine:
        async with stream(tmp_path, engine, groups_wanted=total * BATCH, max_groups=DEPTH * BATCH) as parts:
            for step in range(total):
                await parts.until_pending(BATCH)
                groups = await parts.coordinator.wait_for_groups(BATCH, 1)
                assert groups is not None
                parts.coordinator.training_completed(step, step + 1, [group.position for group in groups[:BATCH]])
            assert parts.coordinator.lease("other", 1, total).status is LeaseStatus.DONE
            parts.producer.stop()
            await asyncio.wait_for(parts.running, 20)
            counts = parts.coordinator.counts()
            assert (counts.trained, counts.pending, counts.in_flight) == (total * BATCH, 0, 0)
