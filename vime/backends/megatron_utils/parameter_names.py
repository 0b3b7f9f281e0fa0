"""Names of parameters and buffers in the whole model, whatever part of it a rank holds."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import unwrap_model

_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(\..*)$")
_EXPERT = re.compile(r"^(.*\.local_experts\.)(\d+)(\..*)$")


def global_parameters(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters by the name that they have in the whole model, without the names of wrappers."""
    found = global_tensors(chunks)
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, torch.nn.Parameter)}


def global_tensors(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """This rank's parameters and saved buffers by the name that they have in the whole model, without wrappers."""
    found: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        core = unwrap_model(chunk)
        first_layer = get_transformer_layer_offset(core.config, core.vp_stage)
        local_experts = (core.config.num_moe_experts or 0) // core.config.expert_model_parallel_size
        first_expert = local_experts * parallel_state.get_expert_model_parallel_rank()
        for name, tensor in core.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor):
                found[_renumbered(_EXPERT, _renumbered(_LAYER, name, first_layer), first_expert)] = tensor
    return found


def _renumbered(pattern: re.Pattern[str], name: str, offset: int) -> str:
    match = pattern.match(name)
    return f"{match[1]}{int(match[2]) + offset}{match[3]}" if match else name
