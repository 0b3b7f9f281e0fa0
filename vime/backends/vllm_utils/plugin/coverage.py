"""Does a set of loaded weights fill the whole model? Reads vLLM's bookkeeping of a layerwise reload."""

from __future__ import annotations

import torch
from vllm.model_executor.layers import attention
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import meta
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

_NOT_LOADED = frozenset(vars(meta).get("SKIP_LOAD_TENSORS") or vars(meta)["SKIP_TENSORS"])
"""Parameters that no checkpoint holds; vLLM 0.32 has another name for them than 0.26."""


def incomplete_layers(model: torch.nn.Module, filled_by_others: frozenset[str]) -> list[str]:
    """Names of the layers whose parameters have not all been loaded; call it between loading and finalising.

    vLLM closes a layer's bookkeeping as soon as it is full, so only open layers need a look. Not counted: buffers,
    attention layers (they only hold optional scales), the rows that pad a vocabulary, and the layers named in
    `filled_by_others`, which share the weight of another layer.
    """
    incomplete = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        counts = name not in filled_by_others and not _is_attention(layer)
        if counts and info.can_load() and info.load_numel < _numel_to_load(layer):
            incomplete.append(name)
    return incomplete


def abandon_reload(model: torch.nn.Module) -> None:
    """Forget weights that wait in half-filled layers, so that finalising puts the layers' old tensors back."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0


def _numel_to_load(layer: torch.nn.Module) -> int:
    parameters = {name: p for name, p in layer._parameters.items() if p is not None and name not in _NOT_LOADED}
    if isinstance(layer, VocabParallelEmbedding):
        rows = int(layer.shard_indices.num_org_elements)
        return sum(rows * p[0].numel() if p.ndim > 1 else rows for p in parameters.values())
    # A weight that its layer pads says how much of it a checkpoint holds.
    return sum(int(vars(p).get("weight_loader_numel", p.numel())) for p in parameters.values())


def _is_attention(layer: torch.nn.Module) -> bool:
    if "is_deferred_attention_layer" in vars(attention):
        return bool(attention.is_deferred_attention_layer(layer))
    return isinstance(layer, (attention.Attention, attention.MLAAttention))
