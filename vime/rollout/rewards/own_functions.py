"""The user's reward functions: `async def` for what waits, plain `def` for what computes."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from vime.errors import SettingsError
from vime.utils.types import Sample

_KEPT_HERE = frozenset(
    {
        *("multimodal_inputs", "multimodal_train_inputs", "multimodal_train_input_id"),
        *("rollout_topk_token_ids", "rollout_topk_log_probs", "rollout_routed_experts"),
        *("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_top_p_log_probs"),
    }
)
"""Fields of a sample that aren't sent to the process of a plain function: large, and no plain values."""


def load_own_function(flag: str, path: str) -> Callable[..., Any]:
    """Import `package.module.function`. Raises `SettingsError`."""
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise SettingsError(f"{flag} is {path!r}, allowed: package.module.function.", next_step="Give the full path.")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise SettingsError(
            f"{flag} {path}: {error}.", next_step="Start vime where the module can be imported, or set PYTHONPATH."
        ) from error
    function = vars(module).get(name)
    if not callable(function):
        raise SettingsError(f"{flag} {path}: {module_name} has no function {name!r}.", next_step="Correct the path.")
    loaded: Callable[..., Any] = function
    return loaded


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call returns a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def sendable(sample: Sample) -> dict[str, Any]:
    """The sample for another process, by `Sample.to_dict`; without media, candidates and routes."""
    known = {name for name in Sample.__dataclass_fields__ if name not in _KEPT_HERE}
    return {name: value for name, value in sample.to_dict().items() if name in known}
