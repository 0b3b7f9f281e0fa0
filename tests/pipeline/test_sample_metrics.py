"""Metrics of a batch's samples, against numbers computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.planner import PLAN_VERSION, BatchPlan, PlannedGroup, PlannedSample
from pipeline.sample_metrics import MEANINGS, sample_metrics
from storage.refs import PoolRef
from storage.sample_sums import SampleSums

REF = PoolRef("r", "pack", "s", 1, "c", 1, "sha256", 0, 0, "digest", 4, 100)


def plan(sums: list[SampleSums], *samples: dict[str, Any]) -> BatchPlan:
    """Of groups with these sums; the samples are all of the first."""
    groups = [PlannedGroup(number, number, REF, each) for number, each in enumerate(sums)]
    base = {"total_length": 0, "advantage": 0.0, "mask_sum": 0.0, "reward": 0.0, "age_versions": 0, "truncated": False}
    planned = [PlannedSample(group=0, member=m, sample_index=m, **{**base, **s}) for m, s in enumerate(samples)]
    return BatchPlan(PLAN_VERSION, "b", 0, 1, groups, planned, [])


def test_every_metric_of_a_batch_that_has_them_all() -> None:
    sums = [SampleSums(1, 30, 9, 4, 8, 5, 3, 9), SampleSums(0, 2, 1, 1, 12, 5, 5, 11)]
    batch = plan(
        sums,
        {"response_length": 40, "num_loss_tokens": 10, "non_generation_s": 0.5},
        {"response_length": 40, "num_loss_tokens": 40, "non_generation_s": 1.5},
        {"response_length": 10, "num_loss_tokens": 0, "non_generation_s": 4.0},
        {"response_length": 10, "num_loss_tokens": 10, "is_of_unknown_version": True},
    )
    found = sample_metrics(batch, step_s=5.0, num_engine_gpus=2)
    assert found == pytest.approx(
        {
            "rollout/repetition_frac": 1 / 4,
            "rollout/avg_cached_tokens_per_sample": 32 / 4,
            "rollout/staleness/unknown_count": 1,
            "rollout/top_p_kept_vocab_per_token": 10 / 5,
            "rollout/spec_accept_rate": 10 / 20,
            "rollout/spec_accept_length": 20 / 8,
            "perf/tokens_per_gpu_per_sec": 100 / 5 / 2,
            "perf/effective_tokens_per_gpu_per_sec": 60 / 5 / 2,
            "perf/longest_sample_tokens_per_sec": 40 / 5,
            "perf/longest_effective_sample_tokens_per_sec": 40 / 5,
            "perf/non_generation_time/mean": 6 / 4,
            "perf/non_generation_time/median": 1.0,
            "perf/non_generation_time/max": 4.0,
            "perf/non_generation_time/min": 0.0,
            "perf/longest_sample_non_generation_time": 1.0,
        }
    )
    assert set(found) == set(MEANINGS)


def test_what_no_sample_has_is_left_out() -> None:
    found = sample_metrics(plan([SampleSums()], {"response_length": 8}), step_s=2.0, num_engine_gpus=0)
    assert found == {
        "rollout/repetition_frac": 0.0,
        "rollout/avg_cached_tokens_per_sample": 0.0,
        "rollout/staleness/unknown_count": 0,
        "perf/longest_sample_tokens_per_sec": 4.0,
        "perf/longest_effective_sample_tokens_per_sec": 0.0,
    }
