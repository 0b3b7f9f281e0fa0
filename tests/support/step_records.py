"""Lines of metrics for tests of what reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pipeline.progress import StepRecord


def step_record(rollout_id: int = 0, **changes: Any) -> StepRecord:
    """A batch of a healthy run."""
    values: dict[str, Any] = {
        "branch": "b", "rollout_id": rollout_id, "num_rollout": 20, "policy_version": rollout_id + 1,
        "time_s": 1000.0 + 10 * rollout_id, "reward_mean": 0.5, "reward_std": 0.1, "signal_share": 0.9,
        "response_tokens_mean": 20.0, "truncated_share": 0.0, "staleness_mean": 1.0, "staleness_max": 2,
        "trained_tokens_per_s": 100.0, "generated_tokens_per_s": 120.0, "wait_s": 4.0, "train_s": 3.0,
        "publish_s": 2.0, "pause_s": 0.5, "update_weights_wire_bytes": 1, "update_weights_density": 1.0,
        "step_s": 9.0, "trainer_idle_share": 0.4, "generator_idle_share": 0.1, "generated": 100, "trained": 80,
        "pending": 12, "in_flight": 8, "dropped": {}, "spanning_samples": 0, "groups_aborted": 0,
        "failed_samples": {}, "reward_by_source": {},
        "train": {"loss": 0.1, "grad_norm": 1.0, "entropy_loss": 0.7, "train_rollout_logprob_abs_diff": 0.01},
        **changes,
    }  # fmt: skip
    return StepRecord(**values)


def write_metrics(path: Path, steps: list[StepRecord]) -> None:
    """As a run writes them."""
    path.write_bytes(b"".join(msgspec.json.encode(step) + b"\n" for step in steps))
