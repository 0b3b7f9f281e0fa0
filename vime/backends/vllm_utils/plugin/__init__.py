"""What vime adds to vLLM, loaded by vLLM's own plug-in mechanism in every one of its processes.

- the weight-transfer engine `vime`, which stages weights from a process group or from disk, verifies them, and loads;
- methods of the workers that begin a staging and tell how it stands (by `--worker-extension-cls`);
- the change of weights between two steps (`core_swap`);
- repairs of what vLLM computes wrongly (`expert_prepack`, `tied_heads`, `rotary_repair`, `draft_repair`);
- the residual stream in float32, where the launcher asks for it (`residual`);
- a faster search for the most probable tokens on a CPU (`top_k`), and faster scores on a GPU (`gpu_scores`);
- the sample route, which returns what a sample needs as columns (`endpoint`, loaded as an endpoint plug-in);
- when vime's launcher asks for it, the end of every vLLM process together with its parent.
"""

from __future__ import annotations

import contextlib
import os

from vime.backends.vllm_utils.death import DIE_WITH_PARENT_ENV, die_with_parent

PLUGIN = "vime"
"""Name of vime's entry points; `VLLM_PLUGINS` has to name those that serve routes."""

WEIGHT_BACKEND = "vime"
"""Value of vLLM's `--weight-transfer-config.backend`."""

WORKER_EXTENSION = "vime.backends.vllm_utils.plugin.worker.VimeWorker"
"""Value of vLLM's `--worker-extension-cls`."""

FP32_RESIDUAL_ENV = "VIME_ENGINE_FP32_RESIDUAL"
"""Set by the launcher in an engine's environment, where `--backend-parity strict` asks for it; see `residual`."""


def register() -> None:
    """Entry point of the `vllm.general_plugins` group; may be called more than once in a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from vime.backends.vllm_utils.plugin import (
        core_columns,
        core_swap,
        draft_repair,
        gpu_scores,
        received_columns,
        residual,
        rotary_repair,
        top_k,
        worker_methods,
    )

    if os.environ.get(DIE_WITH_PARENT_ENV):
        die_with_parent()
    with contextlib.suppress(ValueError):  # vLLM's answer to a second registration
        WeightTransferEngineFactory.register_engine(
            WEIGHT_BACKEND, "vime.backends.vllm_utils.plugin.weight_engine", "VimeWeightEngine"
        )
    core_columns.install()
    core_swap.install()
    draft_repair.install()
    gpu_scores.install()
    received_columns.install()
    residual.install()
    rotary_repair.install()
    top_k.install()
    worker_methods.install()
