"""Filters by the rewards of a group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from vime.rollout.filter_hub.base_types import DynamicFilterOutput
from vime.rollout.rewards import reward_value
from vime.utils.types import Sample

_LEAST_STD = 1e-6


def check_reward_nonzero_std(args: Any, samples: list[Sample], **_: Any) -> DynamicFilterOutput:
    """Keep a group whose rewards differ, so that it has something to teach. The reason names the reward that all had.

    The standard deviation is computed in float64 and must exceed 1e-6.
    """
    rewards = [reward_value(sample, args.reward_key) for sample in samples]
    if float(np.std(np.asarray(rewards, np.float64))) > _LEAST_STD:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(args: Any, samples: list[Sample], **keywords: Any) -> DynamicFilterOutput:
    """As `check_reward_nonzero_std`, but a group is kept where too few are left."""
    return replace(check_reward_nonzero_std(args, samples, **keywords), keep_when_insufficient=True)
