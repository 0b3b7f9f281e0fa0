"""Megatron-Core's self-attention over packed sequences."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention

from vime.backends.megatron_utils.attention import Pack
from vime.backends.megatron_utils.fused.rotation import Rotation
from vime.backends.megatron_utils.fused.rule import runs_fused
from vime.backends.megatron_utils.norm import RMSNorm


class PackedSelfAttention(SelfAttention):  # type: ignore[misc]
    """`SelfAttention` that norms and rotates queries and keys in one pass over memory each way, where it can."""

    _rotation: Rotation | None = None
    """Of the pack that is being computed, where norms and rotation are fused."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        *args: Any,
        rotary_pos_emb: Any = None,
        packed_seq_params: Pack | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states [T, 1, H] of this rank; (outputs of that shape, bias [H] or None)."""
        fits = packed_seq_params is not None and runs_fused(hidden_states) and self._has_plain_heads()
        self._rotation = packed_seq_params.rotation if packed_seq_params is not None and fits else None
        try:
            outputs: tuple[torch.Tensor, torch.Tensor | None] = super().forward(
                hidden_states,
                *args,
                rotary_pos_emb=rotary_pos_emb if self._rotation is None else None,
                packed_seq_params=packed_seq_params,
                **kwargs,
            )
        finally:
            self._rotation = None
        return outputs

    def get_query_key_value_tensors(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's: queries [T, 1, heads, d], keys and values [T, 1, groups, d]; rotated where that is fused."""
        if self._rotation is None:
            return super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        from vime.backends.megatron_utils.fused.heads import HeadNorms, rotated_heads

        mixed, _ = self.linear_qkv(hidden_states)
        norms = None
        if self.q_layernorm is not None:
            norms = HeadNorms(self.q_layernorm.weight, self.k_layernorm.weight, self.q_layernorm.eps)
        parts = rotated_heads(
            mixed[:, 0],
            self._rotation,
            groups=self.num_query_groups_per_partition,
            size=self.hidden_size_per_attention_head,
            norms=norms,
        )
        return tuple(part[:, None] for part in parts)

    def _has_plain_heads(self) -> bool:
        """Whether each group of queries lies beside its key and value on this rank, with nothing else among them.

        And whether they are rotated: Megatron leaves that out in some layers of a model with `no_rope_freq`.
        """
        config = self.config
        norms = self.q_layernorm, self.k_layernorm
        unusual = (
            config.num_query_groups < self.world_size,
            config.attention_output_gate,
            config.test_mode,
            config.flash_decode,
            config.no_rope_freq is not None,
            self._yarn_concentration_factor != 1.0,
            any(norm is not None and not isinstance(norm, RMSNorm) for norm in norms),
            (norms[0] is None) != (norms[1] is None),
        )
        return not any(unusual)
