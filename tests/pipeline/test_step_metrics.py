"""What the record of a rollout batch says beside plain numbers."""

from __future__ import annotations

import pytest

from pipeline.messages import TrainReport
from pipeline.planner import BatchPlan, PlannedSample
from pipeline.step_metrics import rollout_numbers, routes_alarm


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


def planned(group: int, response_length: int, reward: float) -> PlannedSample:
    return PlannedSample(group, 0, 0, 100, response_length, 0.0, 1.0, reward, 0, False)


def test_groups_of_equal_rewards_are_counted_by_reward() -> None:
    samples = [planned(0, 3, 1.0), planned(0, 9, 1.0), planned(1, 4, 0.0), planned(1, 5, 1.0), planned(2, 4, 1.04)]
    plan = BatchPlan(1, "b", 0, 0, [], samples, [])
    assert rollout_numbers(plan) == {
        "response_len/median": 4.0,
        "response_len/max": 9.0,
        "response_len/min": 3.0,
        "zero_std/1": 2.0,
    }
