"""Repair for mixture-of-experts models on a CPU.

vLLM 0.32 packs expert weights for its CPU kernel when a model is first loaded, but not after a layerwise reload: the
kernel then reads plain weights as packed ones and answers nonsense without an error. The packing step is run again
here, after every complete reload, unless vLLM has begun to do it itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class _ExpertLayer:
    layer: Any
    experts: Any
    packed_by_vllm: bool = False


class ExpertPrepack:
    """Finds the expert layers of a loaded model and repeats their packing after a reload."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._layers = [_ExpertLayer(layer, experts) for layer, experts in _cpu_experts(model)]
        for entry in self._layers:
            _watch(entry)

    def begin_reload(self) -> None:
        """Call before a reload."""
        for entry in self._layers:
            entry.packed_by_vllm = False

    def repair(self) -> None:
        """Call after a reload that filled every layer: packs the experts that vLLM left plain, in place."""
        for entry in self._layers:
            if entry.packed_by_vllm:
                continue
            kernel_tensors = {name: getattr(entry.layer, name) for name in ("w13_weight", "w2_weight")}
            for name, parameter in kernel_tensors.items():
                plain = torch.nn.Parameter(parameter.detach().clone(), requires_grad=False)
                entry.layer.register_parameter(name, plain)
            entry.experts.process_weights_after_loading(entry.layer)
            for name, parameter in kernel_tensors.items():
                parameter.data.copy_(getattr(entry.layer, name))
                entry.layer.register_parameter(name, parameter)


def _cpu_experts(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    except ImportError:  # a vLLM without CPU experts
        return []
    found = []
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and method.moe_kernel is not None:
            experts = method.moe_kernel.fused_experts
            if isinstance(experts, CPUUnquantizedExperts):
                found.append((layer, experts))
    return found


def _watch(entry: _ExpertLayer) -> None:
    packing = entry.experts.process_weights_after_loading

    def watched(layer: torch.nn.Module) -> None:
        packing(layer)
        entry.packed_by_vllm = True

    entry.experts.process_weights_after_loading = watched
