"""Groups that a filter rejects are replaced, counted by reason, and no failures; surplus ones stay in the queue."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.failed_fraction import check_failed_fraction, check_some_accepted
from tests.pipeline.stream_parts import stream
from tests.support.standin_engine import StandinEngine
from vime.errors import TooManyFailuresError
from vime.rollout.dynamic_filter import without_rejections
from vime.rollout.filter_hub.dynamic_sampling_filters import (
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
)
from vime.utils.types import Sample

pytestmark = pytest.mark.usefixtures("quick_retries")

FILTERS = "tests.pipeline.filters_for_tests"
ZERO_STD = "vime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"


async def varied_in_even_groups(args: Any, sample: Sample) -> float:  # noqa: ARG001
    return float((sample.index or 0) % 2) if (sample.group_index or 0) % 2 == 0 else 0.0


async def test_rejected_groups_are_replaced_and_counted_by_reason(tmp_path: Path, engine: StandinEngine) -> None:
    async with stream(tmp_path, engine, reward=varied_in_even_groups, groups_wanted=4, filter_path=ZERO_STD) as parts:
        await parts.until_pending(4)
        counts = parts.coordinator.counts()
        assert set(counts.dropped) == {"filter_zero_std_0.0"}
        assert without_rejections(counts.dropped) == {}
        groups = await parts.coordinator.wait_for_groups(4, 1) or []
        assert {group.group_index % 2 for group in groups} == {0}
        assert parts.coordinator.identity().holds


async def test_a_run_whose_every_group_is_rejected_stops_with_the_reasons(
    tmp_path: Path, engine: StandinEngine
) -> None:
    async with stream(tmp_path, engine, groups_wanted=4, filter_path=f"{FILTERS}.refuse_all") as parts:
        while sum(parts.coordinator.counts().dropped.values()) < 8:
            await asyncio.sleep(0.01)
        counts = parts.coordinator.counts()
    check_failed_fraction(without_rejections(counts.dropped), counts.generated, allowed=0.0, run=tmp_path)
    with pytest.raises(TooManyFailuresError, match=r"0 of \d+ groups were accepted.*filter_rejected \(\d+\)"):
        check_some_accepted(counts.dropped, counts.pending, batch=2, run=tmp_path)


async def test_a_filter_that_fails_is_a_failure_of_its_group(tmp_path: Path, engine: StandinEngine) -> None:
    async with stream(
        tmp_path, engine, groups_wanted=2, max_attempts=1, filter_path=f"{FILTERS}.fail_on_the_first"
    ) as parts:
        await parts.until_pending(2)
        assert parts.coordinator.counts().dropped == {"failing_filter": 1}


async def test_surplus_groups_are_generated_at_once_and_stay_in_the_queue(
    tmp_path: Path, engine: StandinEngine
) -> None:
    async with stream(tmp_path, engine, groups_wanted=2, surplus=2, max_groups=4) as parts:
        await parts.until_pending(4)
        await asyncio.sleep(0.2)
        counts = parts.coordinator.counts()
        assert (counts.pending, counts.in_flight, counts.dropped) == (4, 0, {})


@pytest.mark.parametrize(
    ("rewards", "keep", "reason"),
    [([1.0, 1.0], False, "zero_std_1.0"), ([0.25, 0.25], False, "zero_std_0.2"), ([0.0, 1.0], True, None)],
)
def test_a_group_whose_rewards_are_all_equal_has_nothing_to_teach(
    rewards: list[float], keep: bool, reason: str | None
) -> None:
    args, samples = SimpleNamespace(reward_key=None), [Sample(reward=reward) for reward in rewards]
    found = check_reward_nonzero_std(args, samples)
    assert (found.keep, found.reason, found.keep_when_insufficient) == (keep, reason, False)
    assert check_reward_nonzero_std_with_fallback(args, samples).keep_when_insufficient
