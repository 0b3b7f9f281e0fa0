"""Layers that predict further tokens (multi-token prediction, DeepSeek-V3, arXiv:2412.19437, section 2.2), on packs.

A layer of depth k (from 1) joins what the one before it knows at a token with the embedding of the k-th token after
it, and predicts the one behind that. Megatron's own block shifts tokens inside the model; here each rank is given those
that it needs, whatever part of a pack it holds.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.utils import make_viewless_tensor

from vime.backends.megatron_utils.norm import RMSNorm


class PackedFurtherLayer(MultiTokenPredictionLayer):  # type: ignore[misc]
    """Megatron's layer, whose shifted tokens come with the pack (`Pack.further_tokens`)."""

    def _get_embeddings(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        embedding: Any,
        hidden_states: torch.Tensor,
        packed_seq_params: Any = None,
        padding_mask: torch.Tensor | None = None,
    ) -> tuple[Any, ...]:
        tokens = packed_seq_params.further_tokens[self.layer_number - 1]
        embedded = embedding(input_ids=tokens, position_ids=position_ids)
        if self.config.mtp_detach_heads:
            embedded = embedded.detach()
        hidden_states = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
        if not hidden_states.requires_grad:
            hidden_states.requires_grad_(True)
        return input_ids, position_ids, padding_mask, embedded, hidden_states


def further_block(num_layers: int, layer: ModuleSpec) -> MultiTokenPredictionBlockSubmodules:
    """`num_layers` depths, each of which ends in a `layer`."""
    parts = MultiTokenPredictionLayerSubmodules(
        enorm=RMSNorm, hnorm=RMSNorm, layer_norm=RMSNorm, eh_proj=ColumnParallelLinear, mtp_model_layer=layer
    )
    spec = ModuleSpec(module=PackedFurtherLayer, submodules=parts)
    return MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * num_layers)
