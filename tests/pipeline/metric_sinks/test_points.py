"""Which series the sinks are given."""

from __future__ import annotations

import math

from pipeline.metric_sinks.points import batch_point, evaluation_point
from tests.pipeline.metric_sinks.records_for_sinks import evaluation_record, step_record


def test_a_batch_has_the_documented_series() -> None:
    values = batch_point(step_record(3, reward_mean=0.5, wait_s=7.0, pending=4), 2, is_told=False).values
    assert {
        "rollout/step": 3,
        "rollout/raw_reward": 0.5,
        "rollout/response_len/mean": 1,
        "rollout/response_len/max": 9,
        "rollout/zero_std/count_1.0": 3,
        "rollout/truncated_ratio": 1,
        "rollout/staleness/mean": 1,
        "rollout/staleness/max": 1,
        "rollout/pass@1": 0.5,
        "rollout/failed_samples/timeout": 1,
        "rollout/reward_by_source/math": 0.5,
        "perf/rollout_time": 7,
        "perf/tokens_per_gpu_per_sec": 8,
        "perf/update_weights_wire_bytes": 1,
        "perf/update_weights_density": 1,
        "queue/pending": 4,
        "queue/dropped/reward": 2,
        "train/loss": 0.125,
        "train/grad_norm": 1.5,
    }.items() <= values.items()


def test_the_train_step_is_that_of_the_last_optimizer_step() -> None:
    assert [batch_point(step_record(r), 4, is_told=False).values["train/step"] for r in (0, 1)] == [3, 7]
    point = evaluation_point(evaluation_record(2), 4)
    assert point is not None
    assert (point.step, point.values) == (2, {"rollout/step": 2, "train/step": 8, "eval/math": 0.25})


def test_what_the_users_own_function_reports_is_not_reported_again() -> None:
    values = batch_point(step_record(3), 1, is_told=True).values
    assert set(values) == {"rollout/step", "train/step", "train/loss", "train/grad_norm"}
    assert evaluation_point(evaluation_record(2, is_reported=True), 1) is None


def test_an_evaluation_without_a_result_is_no_point() -> None:
    assert evaluation_point(evaluation_record(2, metrics={}, problem="no engine"), 1) is None


def test_a_value_that_no_chart_can_show_is_left_out() -> None:
    record = step_record(0, train={"loss": math.nan, "grad_norm": math.inf, "lr": 0.5})
    train = {name for name in batch_point(record, 1, is_told=False).values if name.startswith("train/")}
    assert train == {"train/step", "train/lr"}
