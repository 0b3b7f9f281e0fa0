"""From lines of `metrics.jsonl` to the points of TensorBoard and Weights & Biases."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pipeline.evaluation.records import EvaluationRecord
from pipeline.metric_sinks.point import ROLLOUT_STEP, TRAIN_STEP, Kind, Point
from pipeline.progress import StepRecord

SERIES: Mapping[str, str] = {
    "rollout/raw_reward": "reward_mean",
    "rollout/reward_std": "reward_std",
    "rollout/signal_share": "signal_share",
    "rollout/response_len/mean": "response_tokens_mean",
    "rollout/response_len/median": "response_tokens_median",
    "rollout/response_len/max": "response_tokens_max",
    "rollout/response_len/min": "response_tokens_min",
    "rollout/prefix_cache_hit_rate": "prefix_cache_hit_rate",
    "rollout/stale_prefix_share": "stale_prefix_share",
    "rollout/reward_time_share": "reward_time_share",
    "rollout/truncated_ratio": "truncated_share",
    "rollout/staleness/mean": "staleness_mean",
    "rollout/staleness/max": "staleness_max",
    "rollout/policy_version": "policy_version",
    "rollout/spanning_samples": "spanning_samples",
    "rollout/drifted_tokens": "drifted_tokens",
    "rollout/groups_aborted": "groups_aborted",
    "perf/rollout_time": "wait_s",
    "perf/train_time": "train_s",
    "perf/publish_time": "publish_s",
    "perf/pause_time": "pause_s",
    "perf/step_time": "step_s",
    "perf/trained_tokens_per_s": "trained_tokens_per_s",
    "perf/generated_tokens_per_s": "generated_tokens_per_s",
    "perf/trainer_idle_share": "trainer_idle_share",
    "perf/generator_idle_share": "generator_idle_share",
    "perf/update_weights_wire_bytes": "update_weights_wire_bytes",
    "perf/update_weights_density": "update_weights_density",
    "queue/generated": "generated",
    "queue/trained": "trained",
    "queue/pending": "pending",
    "queue/in_flight": "in_flight",
}
"""Name of a series -> field of `StepRecord`."""

FAMILIES: Mapping[str, str] = {
    "train/": "train",
    "rollout/": "reports",
    "rollout/reward_by_source/": "reward_by_source",
    "rollout/failed_samples/": "failed_samples",
    "rollout/zero_std/count_": "zero_std",
    "queue/dropped/": "dropped",
    "alarms/": "alarm_levels",
    "": "sample_metrics",
}
"""Beginning of the names of several series -> field of `StepRecord` that holds them by name."""


def batch_point(record: StepRecord, steps_per_rollout: int, *, is_told: bool) -> Point:
    """A rollout batch; when the user's own function has reported it, of the training alone.

    `train/step` numbers optimizer steps from 0; it is the batch's last one, whose values the series `train/` are.
    """
    values = {f"train/{name}": float(value) for name, value in record.train.items()}
    if not is_told:
        values |= {name: float(getattr(record, field)) for name, field in SERIES.items()}
        for prefix, field in FAMILIES.items():
            values |= {f"{prefix}{name}": float(value) for name, value in getattr(record, field).items()}
    last_step = (record.rollout_id + 1) * steps_per_rollout - 1
    return _point(Kind.BATCH, record.rollout_id, last_step, record.time_s, values)


def evaluation_point(record: EvaluationRecord, steps_per_rollout: int) -> Point | None:
    """An evaluation; None where there is no result, or the user's own function has reported it."""
    if record.is_reported or not record.metrics:
        return None
    step = record.evaluation
    return _point(Kind.EVALUATION, step, step * steps_per_rollout, record.time_s, record.metrics)


def _point(kind: Kind, step: int, train_step: int, time_s: float, values: Mapping[str, float]) -> Point:
    finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
    return Point(kind, step, time_s, {ROLLOUT_STEP: step, TRAIN_STEP: train_step, **finite})
