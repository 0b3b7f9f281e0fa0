"""The reward of a run that is not about rewards: fine-tuning on records, or distillation alone."""

from __future__ import annotations

from typing import Any

from vime.utils.types import Sample


async def no_reward(args: Any, sample: Sample) -> float:  # noqa: ARG001 - the documented hook signature
    """0 for every sample."""
    return 0.0
