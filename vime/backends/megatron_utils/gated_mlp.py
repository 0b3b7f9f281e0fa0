"""The feed-forward part of a layer without experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP

from vime.backends.megatron_utils.fused.rule import runs_fused


class GatedMLP(MLP):  # type: ignore[misc]
    """`MLP` whose SwiGLU takes one pass over memory each way, where it is one without further parts."""

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states [T, 1, H]; (outputs [T, 1, H], bias [H] or None)."""
        if per_token_scale is not None or not (runs_fused(hidden_states) and is_plain_swiglu(self.config)):
            plain: tuple[torch.Tensor, torch.Tensor | None] = super().forward(hidden_states, per_token_scale, **kwargs)
            return plain
        from vime.backends.megatron_utils.fused.gate import swiglu

        inner, _ = self.linear_fc1(hidden_states)
        outputs: tuple[torch.Tensor, torch.Tensor | None] = self.linear_fc2(swiglu(inner))
        return outputs


def is_plain_swiglu(config: Any) -> bool:
    """Whether a layer's activation is silu(gates) * linear parts and nothing else."""
    unusual = (
        config.add_bias_linear,
        config.activation_func_clamp_value is not None,
        config.glu_linear_offset != 0,
        config.use_te_activation_func,
    )
    return bool(config.gated_linear_unit) and config.activation_func is F.silu and not any(unusual)
