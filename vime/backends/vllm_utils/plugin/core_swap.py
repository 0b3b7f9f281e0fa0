"""A version that is beside the model goes into it between two steps, without a halt.

The engine's core calls its workers one thing after another: a step that is in flight was sent to every worker before
the swap, and the next one is sent after it. So every worker changes its weights between the same two steps, and the
labels of tokens, which a step gets when it is scheduled, are those of the weights that compute it.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore

from vime.backends.vllm_utils.plugin.core_columns import set_label

SWAP_WEIGHTS, SWAP_SECONDS = "vime_swap_weights", "vime_swap_seconds"
"""Names for `call_utility_async`."""


def install() -> None:
    """Extend vLLM's class in this process; may be called more than once."""
    setattr(EngineCore, SWAP_WEIGHTS, _swap)
    setattr(EngineCore, SWAP_SECONDS, _seconds)


def _swap(core: Any, label: str) -> None:
    """Load the staged version with this label, a number, and label the steps that follow.

    When it fails no further step runs before a later publication has loaded whole weights.
    """
    began = time.perf_counter()
    try:
        core.model_executor.collective_rpc("vime_swap_weights", args=(int(label),))
    except Exception:
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        raise
    set_label(core, label)
    core.vime_swap_held_s = time.perf_counter() - began


def _seconds(core: Any) -> float | None:
    """For how long the newest swap kept the engine from its steps, at most; None while that isn't known.

    The time that the core spent on it, and that of the copies on the slowest GPU.
    """
    on_gpus = core.model_executor.collective_rpc("vime_copy_seconds")
    if None in on_gpus:
        return None
    return float(core.vime_swap_held_s + max(on_gpus))
