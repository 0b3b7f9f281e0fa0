"""What flags ask to be reported of a rollout batch beyond the fixed columns; it looks at the batch's samples."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import msgspec
import numpy as np

from pipeline.planner import BatchPlan
from pipeline.progress import StepRecord
from pipeline.stored_samples import stored_samples
from storage.contracts import PayloadPool
from vime.algorithms.pass_rate import CORRECT, pass_rates
from vime.rollout.rewards import reward_value
from vime.settings.groups import Settings
from vime.settings.import_paths import load_function
from vime.utils.types import Sample

logger = logging.getLogger(__name__)

FLAG = "--custom-rollout-log-function-path"


class BatchReport:
    """Reads the samples of batches where a flag asks for it, and reports."""

    def __init__(self, settings: Settings, hook_args: Callable[[], Any], open_pool: Callable[[], PayloadPool]) -> None:
        """`hook_args` are asked for when a function of the user's own is called."""
        self._settings, self._hook_args, self._open_pool = settings, hook_args, open_pool

    async def samples(self, plan: BatchPlan) -> list[Sample]:
        """The batch's samples, none where no flag asks for them. Raises `StorageError`."""
        settings = self._settings
        asked = (
            settings.logging.log_passrate,
            settings.logging.log_multi_turn,
            settings.logging.log_correct_samples,
            settings.logging.log_reward_category,
            settings.logging.custom_rollout_log_function_path,
        )
        return await asyncio.to_thread(self._read, plan) if any(asked) else []

    def numbers(self, samples: Sequence[Sample]) -> dict[str, float]:
        """What the flags ask for."""
        settings, key = self._settings, self._settings.rollout.reward_key
        found: dict[str, float] = {}
        if not samples:
            return found
        if settings.logging.log_passrate:
            found |= pass_rate_numbers(samples, key)
        if settings.logging.log_correct_samples:
            found |= correct_numbers(samples, key)
        if settings.logging.log_multi_turn:
            found |= turn_numbers(samples)
        if settings.logging.log_reward_category is not None:
            found |= category_numbers(samples, settings.logging.log_reward_category)
        return found

    async def tell(self, record: StepRecord, samples: list[Sample]) -> tuple[bool, str]:
        """(whether the user's own function has reported the batch, what went wrong in it)."""
        path = self._settings.logging.custom_rollout_log_function_path
        if path is None:
            return False, ""

        def call() -> Any:
            function = load_function(FLAG, path)
            metrics = msgspec.to_builtins(record)
            return function(record.rollout_id, self._hook_args(), samples, metrics, record.step_s)

        try:
            return await asyncio.to_thread(call) is True, ""
        except Exception as error:  # the boundary to user code: a report must not end the run
            logger.exception("%s %s failed", FLAG, path)
            return False, f"{FLAG} {path} raised {type(error).__name__}: {error}"

    def _read(self, plan: BatchPlan) -> list[Sample]:
        with closing(self._open_pool()) as pool:
            return [sample for group in plan.groups for sample in stored_samples(group.ref, pool)]


def pass_rate_numbers(samples: Sequence[Sample], reward_key: str | None) -> dict[str, float]:
    """`pass@k` over the batch's groups; a reward of 1 is right."""
    groups: dict[int, list[float]] = {}
    for sample in samples:
        groups.setdefault(sample.group_index or 0, []).append(reward_value(sample, reward_key))
    return {f"pass@{k}": rate for k, rate in pass_rates(list(groups.values())).items()}


def correct_numbers(samples: Sequence[Sample], reward_key: str | None) -> dict[str, float]:
    """`correct/...`: share and response lengths of the samples with a reward of 1."""
    correct = [sample for sample in samples if reward_value(sample, reward_key) == CORRECT]
    lengths = [sample.response_length for sample in correct]
    return {"correct/share": len(correct) / len(samples), **_spread("correct/response_len", lengths)}


def turn_numbers(samples: Sequence[Sample]) -> dict[str, float]:
    """`multi_turn/...`: rounds where `metadata["round_number"]` tells, and tokens with and without those of tools."""
    rounds = [sample.metadata.get("round_number") for sample in samples]
    return {
        **_spread("multi_turn/rounds", [number for number in rounds if isinstance(number, int | float)]),
        **_spread("multi_turn/response_len", [sample.response_length for sample in samples]),
        **_spread("multi_turn/sampled_len", [sample.effective_response_length for sample in samples]),
    }


def category_numbers(samples: Sequence[Sample], key: str) -> dict[str, float]:
    """`error_cat/VALUE`: share of the samples whose reward, a dict, has this value under `key`."""
    found = Counter(
        str(sample.reward[key]) for sample in samples if isinstance(sample.reward, dict) and key in sample.reward
    )
    return {f"error_cat/{value}": count / len(samples) for value, count in sorted(found.items())}


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        f"{name}/mean": float(np.mean(values)),
        f"{name}/max": float(max(values)),
        f"{name}/min": float(min(values)),
    }
