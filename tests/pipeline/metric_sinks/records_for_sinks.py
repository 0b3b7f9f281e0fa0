"""Records as a run writes them."""

from __future__ import annotations

from typing import Any

import msgspec

from pipeline.evaluation.records import EvaluationRecord
from pipeline.progress import StepRecord

_NAMED = {
    "dropped": {"reward": 2},
    "failed_samples": {"timeout": 1},
    "reward_by_source": {"math": 0.5},
    "train": {"loss": 0.125, "grad_norm": 1.5},
    "reports": {"pass@1": 0.5},
    "zero_std": {"1.0": 3},
    "response_tokens_max": 9,
    "alarms": [],
    "standing_alarms": [],
    "unwritten": [],
    "alarm_levels": {"gap": 2.0},
    "sample_metrics": {"perf/tokens_per_gpu_per_sec": 8.0},
    "reward": "judge",
    "branch": "b",
}


def step_record(rollout_id: int, **changes: Any) -> StepRecord:
    """A batch with 1 in every other field, and one value in each field of named values."""
    values = {field.name: _NAMED.get(field.name, 1) for field in msgspec.structs.fields(StepRecord)}
    times = {"time_s": 1000.0 + rollout_id, "rollout_id": rollout_id}
    return StepRecord(**{**values, **times, **changes})


def evaluation_record(step: int, **changes: Any) -> EvaluationRecord:
    """An evaluation of one data set."""
    values: dict[str, Any] = {
        "evaluation": step,
        "branch": "b",
        "time_s": 1000.0 + step,
        "generate_s": 1.0,
        "seconds": 2.0,
        "policy_version": 1,
        "policy_versions": [1],
        "metrics": {"eval/math": 0.25},
        "data_sets": [],
    }
    return EvaluationRecord(**{**values, **changes})
