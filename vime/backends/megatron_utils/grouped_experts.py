"""Experts of a layer multiplied together, without Transformer Engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP

from vime.backends.megatron_utils.fused.rule import runs_fused

ALIGNED_NUMBERS = 8
"""bfloat16 numbers in the 16 bytes at whose multiples the kernels of grouped products want each row to begin."""


@dataclass(frozen=True)
class ExpertWeights:
    """Of E gated experts with H inputs and outputs and F inner numbers."""

    first: Sequence[torch.Tensor]
    """E times [2 F, H]: gates, then what they are multiplied with"""
    second: Sequence[torch.Tensor]
    """E times [H, F]"""


def grouped_experts(
    hidden: torch.Tensor,
    counts: torch.Tensor,
    scales: torch.Tensor,
    weights: ExpertWeights,
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Outputs [T, H] of experts whose tokens lie one after the other, by grouped products.

    Args:
        hidden: [T, H] bfloat16.
        counts: [E] tokens of each expert, which sum to T.
        scales: [T] what each token's inner numbers are multiplied with.
    """
    ends = counts.to(hidden.device, torch.int32, non_blocking=True).cumsum(0, dtype=torch.int32)
    inner = F.grouped_mm(hidden, torch.stack(list(weights.first)).transpose(1, 2), offs=ends)
    if activation is F.silu and runs_fused(inner):
        from vime.backends.megatron_utils.fused.gate import swiglu

        scaled = swiglu(inner, scales)
    else:
        gate, linear = inner.chunk(2, dim=-1)
        scaled = (activation(gate) * linear * scales[:, None]).to(hidden.dtype)
    return F.grouped_mm(scaled, torch.stack(list(weights.second)).transpose(1, 2), offs=ends)


class GroupedExperts(SequentialMLP):  # type: ignore[misc]
    """`SequentialMLP` with the same parameters: one product for all experts on a GPU in bf16, where it can.

    Copies of a layer's weights side by side exist during its forward pass, and until its backward pass.
    """

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states [T, H] sorted by expert, tokens of each expert [E], scales [T]; (outputs [T, H], no bias)."""
        hidden = permuted_local_hidden_states
        fits = hidden.is_cuda and hidden.dtype == torch.bfloat16 and len(hidden) > 0
        if not (fits and self.tp_group.size() == 1 and are_plain(self.config)):
            result: tuple[torch.Tensor, torch.Tensor | None] = super().forward(
                hidden, tokens_per_expert, permuted_probs
            )
            return result
        weights = ExpertWeights(
            [expert.linear_fc1.weight for expert in self.local_experts],
            [expert.linear_fc2.weight for expert in self.local_experts],
        )
        return grouped_experts(hidden, tokens_per_expert, permuted_probs, weights, self.config.activation_func), None


def are_plain(config: Any) -> bool:
    """Whether an expert is no more than two products with a gate between them, of sizes that grouped products take."""
    unusual = (
        config.add_bias_linear,
        config.moe_apply_probs_on_input,
        config.activation_func_clamp_value is not None,
        config.glu_linear_offset != 0,
        config.fp8 or config.fp4,
        config.hidden_size % ALIGNED_NUMBERS,
        config.moe_ffn_hidden_size % ALIGNED_NUMBERS,
    )
    return bool(config.gated_linear_unit) and not any(unusual)
