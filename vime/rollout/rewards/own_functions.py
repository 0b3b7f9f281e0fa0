"""The user's reward functions: `async def` for what waits, plain `def` for what computes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from vime.utils.types import Sample

_KEPT_HERE = frozenset(
    {
        *("multimodal_inputs", "multimodal_train_inputs", "multimodal_train_input_id"),
        *("rollout_topk_token_ids", "rollout_topk_log_probs", "rollout_routed_experts"),
        *("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_top_p_log_probs"),
    }
)
"""Fields of a sample that aren't sent to the process of a plain function: large, and no plain values."""


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call returns a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def sendable(sample: Sample) -> dict[str, Any]:
    """The sample for another process, by `Sample.to_dict`; without media, candidates and routes."""
    known = {name for name in Sample.__dataclass_fields__ if name not in _KEPT_HERE}
    return {name: value for name, value in sample.to_dict().items() if name in known}
