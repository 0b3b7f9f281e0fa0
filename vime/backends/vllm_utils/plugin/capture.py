"""Routes and nuclei from vLLM's first model runner, which returns neither: vime's worker captures them.

It is the runner of engines on a CPU, and of those on a GPU that have to return nuclei. On GPUs vLLM returns routes
itself when told to.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vime.backends.vllm_utils.plugin.columns import Nuclei
from vime.backends.vllm_utils.plugin.step_extras import StepExtras, add_extras


def start_capture(worker: Any, routes: bool, nucleus: bool) -> None:
    """Make a worker return routes, nuclei or both with each step, from now on.

    Raises `ValueError`, with the reason, where this runner or its configuration can't.
    """
    runner = worker.model_runner
    if not isinstance(runner, GPUModelRunner):
        raise ValueError(
            f"routes and nuclei can be captured from vLLM's first model runner, not from {type(runner).__module__}: "
            "leave VLLM_USE_V2_MODEL_RUNNER unset."
        )
    config = runner.vllm_config
    for name, found in (
        ("speculative decoding", config.speculative_config),
        ("asynchronous scheduling", config.scheduler_config.async_scheduling or None),
        ("a KV connector", config.kv_transfer_config),
    ):
        if found is not None:
            raise ValueError(f"routes and nuclei can't be captured with {name}.")
    recorder = RouteRecorder(runner.model) if routes else None
    nuclei = NucleusRecorder(runner.sampler) if nucleus else None
    _return_extras(runner, recorder, nuclei)


class RouteRecorder:
    """Holds what each MoE layer of a model chose in the latest forward pass."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Raises `ValueError` for a model without routers that tell."""
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

        self._by_layer: dict[int, torch.Tensor] = {}
        self._dtype = torch.uint8 if _num_experts(model) <= 256 else torch.int16
        bind_routed_experts_capturer(model, self)

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Called by each MoE layer with the experts [N, K] that it chose."""
        self._by_layer[layer_id] = topk_ids.to(self._dtype)

    def rows(self, num_tokens: int) -> npt.NDArray[Any]:
        """Experts [N, L, K] of the latest pass, L counting MoE layers only."""
        layers = [self._by_layer[layer_id][:num_tokens].numpy() for layer_id in sorted(self._by_layer)]
        return np.stack(layers, axis=1)


class NucleusRecorder:
    """Holds the tokens that top-p and top-k left in the latest step, of a sampler that returns processed values."""

    def __init__(self, sampler: Sampler) -> None:
        self._latest: Nuclei | None = None
        sample = sampler.sample

        @functools.wraps(sample)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            sampled, log_probs = sample(*args, **kwargs)
            self._latest = None if log_probs is None else nuclei_of(log_probs, args[1])
            return sampled, log_probs

        sampler.sample = recorded

    def take(self) -> Nuclei | None:
        latest, self._latest = self._latest, None
        return latest


def nuclei_of(log_probs: torch.Tensor, sampling_metadata: Any) -> Nuclei:
    """Tokens with a probability above zero, of the requests whose sampling is truncated; none of the others.

    `log_probs` [n, V] are those that the tokens were sampled with.
    """
    kept = log_probs > -torch.inf
    truncated = torch.zeros(len(log_probs), dtype=torch.bool)
    for limit, neutral in ((sampling_metadata.top_p, 1.0), (sampling_metadata.top_k, log_probs.shape[1])):
        if limit is not None:
            truncated |= limit.cpu() < neutral
    kept &= truncated.unsqueeze(1).to(kept.device)
    counts = kept.sum(dim=1).cpu().numpy()
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
    ids = kept.nonzero()[:, 1].to(torch.int32).cpu().numpy()
    return Nuclei(ids, offsets, log_probs[kept].to(torch.float32).cpu().numpy())


def _return_extras(runner: Any, recorder: RouteRecorder | None, nuclei: NucleusRecorder | None) -> None:
    sample_tokens = runner.sample_tokens

    @functools.wraps(sample_tokens)
    def extended(*args: Any, **kwargs: Any) -> Any:
        state = runner.execute_model_state
        output = sample_tokens(*args, **kwargs)
        if state is not None:
            routes = None if recorder is None else recorder.rows(state.scheduler_output.total_num_scheduled_tokens)
            add_extras(output, StepExtras(routes, None if nuclei is None else nuclei.take()))
        return output

    runner.sample_tokens = extended


def _num_experts(model: torch.nn.Module) -> int:
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    counts = [int(module.router.global_num_experts) for module in model.modules() if isinstance(module, MoERunner)]
    if not counts:
        raise ValueError("the model has no experts.")
    return max(counts)
