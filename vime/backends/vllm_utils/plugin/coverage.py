"""Does a set of loaded weights fill the whole model? Reads vLLM's bookkeeping of a layerwise reload."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel


def incomplete_layers(model: torch.nn.Module, filled_by_others: frozenset[str]) -> list[str]:
    """Names of the layers whose parameters have not all been loaded; call it between loading and finalising.

    vLLM closes a layer's bookkeeping as soon as it is full, so only open layers need a look. Not counted: buffers,
    attention layers (they only hold optional scales), the rows that pad a vocabulary, and the layers named in
    `filled_by_others`, which share the weight of another layer.
    """
    incomplete = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        counts = name not in filled_by_others and not is_deferred_attention_layer(layer)
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
    parameters = {name: p for name, p in layer._parameters.items() if p is not None and name not in SKIP_LOAD_TENSORS}
    if isinstance(layer, VocabParallelEmbedding):
        rows = int(layer.shard_indices.num_org_elements)
        return sum(rows * p[0].numel() if p.ndim > 1 else rows for p in parameters.values())
    return sum(int(get_tensor_load_numel(p)) for p in parameters.values())
