"""What the record of a rollout batch says beside plain numbers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pipeline.messages import ProducerStats, QueueCounts, TrainReport
from pipeline.step_metrics import StepClock, routes_alarm, step_record
from storage.pool import Pool
from tests.pipeline.debug.test_dumps import planned


def report(fraction: float | None, *samples: int) -> TrainReport:
    metrics = {} if fraction is None else {"routing_replay_fraction": fraction}
    return TrainReport(metrics, 1.0, 0.0, 10, list(samples))


def test_samples_whose_routes_are_missing_are_named_once_with_the_fraction_that_was_replayed() -> None:
    alarm = routes_alarm([report(0.75, 9, 4), report(0.75, 4)])
    assert alarm == ("Routes were replayed for 75.0% of the tokens of the last step; 2 samples without routes: 4, 9.")


def test_samples_of_earlier_steps_are_named_too() -> None:
    assert "100.0%" in (routes_alarm([report(1.0, 4)]) or "")


@pytest.mark.parametrize("fraction", [None, 1.0])
def test_there_is_no_alarm_where_all_routes_were_replayed_or_none_are(fraction: float | None) -> None:
    assert routes_alarm([report(fraction), report(fraction)]) is None


def test_samples_of_unknown_versions_have_no_part_in_the_staleness(tmp_path: Path) -> None:
    with Pool.create(tmp_path / "pool", "run") as pool:
        plan = planned(pool)
    ages = zip(plan.samples, (1, 4, 0, 0), (False, False, True, True), strict=True)
    samples = [
        msgspec.structs.replace(sample, age_versions=age, is_of_unknown_version=unknown)
        for sample, age, unknown in ages
    ]
    record = step_record(
        msgspec.structs.replace(plan, samples=samples),
        1,
        [report(None)],
        None,
        QueueCounts(2, 0, 2, 0, {}, 0, False),
        [],
        StepClock(),
        {},
    )
    assert (record.staleness_mean, record.staleness_max) == (2.5, 4)
    assert record.sample_metrics["rollout/staleness/unknown_count"] == 2


def test_lengths_equal_rewards_and_the_prefix_cache_are_told(tmp_path: Path) -> None:
    with Pool.create(tmp_path / "pool", "run") as pool:
        plan = planned(pool)
    samples = [
        msgspec.structs.replace(sample, response_length=length, reward=1.0 if sample.group == 0 else sample.reward)
        for sample, length in zip(plan.samples, (1, 2, 3, 10), strict=True)
    ]
    made = [ProducerStats(0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 1.0, cached_prompt_tokens=1, prompt_tokens=n) for n in (1, 3)]
    record = step_record(
        msgspec.structs.replace(plan, samples=samples),
        1,
        [report(None)],
        None,
        QueueCounts(2, 0, 2, 0, {}, 0, False),
        made,
        StepClock(),
        {},
    )
    assert (record.response_tokens_min, record.response_tokens_median, record.response_tokens_max) == (1, 2.5, 10)
    assert record.zero_std == {"1.0": 1}
    assert record.prefix_cache_hit_rate == 0.5
