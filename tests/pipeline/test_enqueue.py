"""Between generation and the queue: what may be in flight, what the queue takes, and what a batch is made of."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.batch_wait import wait_for_batch
from pipeline.packing import PackingSettings
from pipeline.planner import PlanSettings, plan_batch
from pipeline.producer_wiring import max_groups_in_flight
from storage.checks import EnqueueRequirements
from storage.columns import decode_group
from storage.pool import Pool
from storage.queue_types import AcceptedGroup
from storage.route_checks import RouteShape
from tests.pipeline.stream_parts import Parts, constant_reward, stream
from tests.pipeline.test_batch_wait import PartsSource
from tests.support.standin_engine import StandinEngine
from vime.errors import StalledError
from vime.rollout.generate import SampleGenerator
from vime.rollout.sampling import SamplingSettings
from vime.settings.parse import parse_settings
from vime.utils.types import Sample

pytestmark = pytest.mark.usefixtures("quick_retries")

SHAPE = RouteShape(num_layers=2, top_k=2, num_experts=300)


def after_generation(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Have `change(sample)` called on every sample that the engine has answered."""
    generate = SampleGenerator.generate

    async def changed(
        self: SampleGenerator, engine: Any, sample: Sample, sampling: SamplingSettings, **options: Any
    ) -> None:
        await generate(self, engine, sample, sampling, **options)
        change(sample)

    monkeypatch.setattr(SampleGenerator, "generate", changed)


async def accepted(parts: Parts, count: int) -> list[AcceptedGroup]:
    await parts.until_pending(count)
    groups = await parts.coordinator.wait_for_groups(count, 1)
    assert groups is not None
    return groups


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
async def test_a_log_probability_that_is_not_finite_never_gets_into_a_batch(
    tmp_path: Path, engine: StandinEngine, monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    def damage(sample: Sample) -> None:
        if sample.group_index == 1:
            assert sample.rollout_log_probs is not None
            sample.rollout_log_probs[3] = value

    after_generation(monkeypatch, damage)
    async with stream(tmp_path, engine, groups_wanted=3, max_attempts=1) as parts:
        groups = await accepted(parts, 3)
        assert {group.group_index for group in groups} == {0, 2, 3}
        assert sum(parts.coordinator.counts().dropped.values()) == 1


async def test_a_sample_without_routes_is_not_accepted_when_they_are_replayed(
    tmp_path: Path, engine: StandinEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add_routes(sample: Sample) -> None:
        if sample.group_index != 0 or sample.index == 0:
            rows = np.tile(np.array([5, 7]), (len(sample.tokens) - 1, SHAPE.num_layers, 1))
            sample.rollout_routed_experts = rows

    after_generation(monkeypatch, add_routes)
    needs = EnqueueRequirements(routes=SHAPE)
    async with stream(tmp_path, engine, groups_wanted=2, max_attempts=1, needs=needs) as parts:
        groups = await accepted(parts, 2)
        assert {group.group_index for group in groups} == {1, 2}
        with Pool.open(tmp_path / "pool") as pool:
            stored = pool.read_group(groups[0].ref)
    assert stored.columns["routes"].dtype == np.uint16
    routes = decode_group(stored.header, stored.columns)[0].rollout_routed_experts
    assert np.asarray(routes)[0].tolist() == [[5, 7], [5, 7]]


@pytest.mark.parametrize("sc_dtype", ["float16", "float32"])
async def test_candidates_are_stored_as_the_settings_say(
    tmp_path: Path, engine: StandinEngine, monkeypatch: pytest.MonkeyPatch, sc_dtype: str
) -> None:
    def add_candidates(sample: Sample) -> None:
        sample.rollout_topk_token_ids = np.tile(np.array([1, 2], np.int32), (sample.response_length, 1))
        sample.rollout_topk_log_probs = np.full((sample.response_length, 2), -1.5, np.float32)

    after_generation(monkeypatch, add_candidates)
    needs = EnqueueRequirements(sc_top_k=2)
    async with stream(tmp_path, engine, groups_wanted=1, needs=needs, sc_dtype=sc_dtype) as parts:
        (group,) = await accepted(parts, 1)
        with Pool.open(tmp_path / "pool") as pool:
            assert pool.read_columns(group.ref, ["top_k_log_probs"])["top_k_log_probs"].dtype == sc_dtype


async def test_no_more_samples_are_in_flight_than_the_limit_which_counts_samples(
    tmp_path: Path, engine: StandinEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = parse_settings(["--vllm-server-concurrency", "64", "--n-samples-per-prompt", "8"])
    running: set[int | None] = set()
    peak = 0
    generate = SampleGenerator.generate

    async def counted(
        self: SampleGenerator, engine: Any, sample: Sample, sampling: SamplingSettings, **options: Any
    ) -> None:
        nonlocal peak
        running.add(sample.index)
        peak = max(peak, len(running))
        await generate(self, engine, sample, sampling, **options)
        running.remove(sample.index)

    monkeypatch.setattr(SampleGenerator, "generate", counted)
    async with stream(
        tmp_path,
        engine,
        groups_wanted=24,
        max_groups=24,
        n_samples_per_prompt=8,
        max_groups_in_flight=max_groups_in_flight(settings, num_engines=1),
    ) as parts:
        await parts.until_pending(24)
    assert peak == 64


@pytest.mark.parametrize(("concurrency", "engines", "members"), [(64, 1, 8), (10, 3, 8), (8, 1, 8), (7, 2, 5)])
def test_groups_in_flight_never_hold_more_samples_than_all_engines_allow(
    concurrency: int, engines: int, members: int
) -> None:
    settings = parse_settings(["--vllm-server-concurrency", str(concurrency), "--n-samples-per-prompt", str(members)])
    groups = max_groups_in_flight(settings, engines)
    assert groups * members <= concurrency * engines < (groups + 1) * members


def test_producers_share_the_requests_in_flight() -> None:
    words = ["--vllm-server-concurrency", "64", "--n-samples-per-prompt", "8", "--rollout-num-producers", "2"]
    assert max_groups_in_flight(parse_settings(words), num_engines=1) == 4


async def test_each_step_is_full_though_three_groups_in_ten_are_set_aside(
    tmp_path: Path, engine: StandinEngine
) -> None:
    async def reward(args: Any, sample: Sample) -> Any:
        return None if (sample.group_index or 0) % 10 in (0, 4, 7) else await constant_reward(args, sample)

    settings = PlanSettings(
        rollout_batch_size=8,
        rollouts_per_step=8,
        packing=PackingSettings(num_ranks=1, micro_batch_size=2),
        normalize_rewards=True,
        normalize_std=True,
    )
    async with stream(tmp_path, engine, reward=reward, groups_wanted=16, max_groups=16, max_attempts=1) as parts:
        waiting = await accepted(parts, 16)
        for rollout_id in range(2):
            plan = plan_batch(waiting, settings, branch="b", rollout_id=rollout_id, policy_version=1)
            assert len(plan.groups) == 8
            assert [sum(len(batch) for batch in step.ranks[0]) for step in plan.steps] == [8, 8]
            assert all(math.isfinite(sample.advantage) for sample in plan.samples)
            waiting = [group for group in waiting if group.position not in plan.positions]
        counts = parts.coordinator.counts()
    assert not waiting
    assert sum(counts.dropped.values()) >= 6
    assert counts.generated == 16 + counts.in_flight + sum(counts.dropped.values())


async def test_a_batch_that_cannot_be_filled_says_what_became_of_its_groups(
    tmp_path: Path, engine: StandinEngine
) -> None:
    async def reward(args: Any, sample: Sample) -> Any:  # noqa: ARG001 - the documented hook signature
        return None

    reports: list[str] = []
    with pytest.raises(StalledError, match=r"waits for 4 groups, 0 are there and \d+ were set aside \(\d+ reward"):
        async with stream(tmp_path, engine, reward=reward, max_attempts=1) as parts:
            await wait_for_batch(
                source := PartsSource(parts),
                source.stats,
                4,
                stall_timeout_s=2.0,
                report=reports.append,
                check=lambda _: None,
                stop_asked=lambda: False,
                interval_s=0.05,
            )
    assert any(re.search(r"\d+ were set aside \(\d+ reward_none\)\.", words) for words in reports), "why, too"
