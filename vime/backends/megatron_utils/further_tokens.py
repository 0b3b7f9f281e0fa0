"""Layers that predict further tokens (multi-token prediction, DeepSeek-V3, arXiv:2412.19437, section 2.2), on packs.

A layer of depth k (from 1) joins what the one before it knows at a token with the embedding of the k-th token after
it, and predicts the one behind that. Megatron's own block shifts tokens inside the model; here each rank is given those
that it needs, whatever part of a pack it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.utils import make_viewless_tensor

from vime.backends.megatron_utils.context import Positions, find
from vime.backends.megatron_utils.norm import RMSNorm
from vime.data.batch import PackedMicrobatch


@dataclass(frozen=True)
class FurtherTargets:
    """What one depth is to predict on this rank: N response tokens that are far enough from their sequence's start."""

    rows: torch.Tensor
    """[N] int64, which of the rank's tokens predicts each"""
    targets: torch.Tensor
    """[N] int64"""
    loss_mask: torch.Tensor
    """[N] bool"""
    lengths: torch.Tensor
    """[S] int64, how many of them each sequence of the microbatch has; sums to N"""


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


def shifted_tokens(microbatch: PackedMicrobatch, places: Positions, num_places: int, depth: int) -> Positions:
    """[num_places]: at each of the `places` the token `depth` behind it in its sequence; 0 where there is none."""
    shifted = np.zeros(num_places, np.int64)
    ends = np.repeat(microbatch.cu_seqlens[1:].astype(np.int64), np.diff(microbatch.cu_seqlens))
    number = np.arange(len(microbatch.tokens))
    inside = np.flatnonzero(number + depth < ends)
    shifted[places[inside]] = microbatch.tokens[inside + depth]
    return shifted


def further_targets(
    microbatch: PackedMicrobatch,
    predictors: npt.NDArray[np.int64],
    places: Positions,
    held: Positions,
    depth: int,
    device: torch.device,
) -> FurtherTargets:
    """Of `depth` (from 1); `predictors` are the tokens [R] before each response token, `held` this rank's places."""
    lengths = microbatch.response_lengths
    starts = np.repeat(microbatch.cu_seqlens[:-1].astype(np.int64), lengths)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    inside = np.flatnonzero(predictors - depth >= starts)
    own, rows = find(places[predictors[inside] - depth], held)
    responses = inside[own]

    def move(array: npt.NDArray[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(array, dtype=dtype).to(device, non_blocking=True)

    return FurtherTargets(
        move(rows),
        move(microbatch.tokens[predictors[responses] + 1]),
        move(microbatch.loss_mask[responses], torch.bool),
        move(np.bincount(sequence[responses], minlength=len(lengths))),
    )
