"""Megatron-Core's multi-head latent attention over packed sequences."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from vime.backends.megatron_utils.attention import Pack
from vime.errors import SettingsError


class PackedLatentAttention(MLASelfAttention):  # type: ignore[misc]
    """`MLASelfAttention` whose rotary embedding follows the position of each token in its own sequence."""

    rotary_pos_emb: torch.nn.Module

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        embedding: torch.nn.Module = self.rotary_pos_emb
        self.rotary_pos_emb = _AnglesOfPack(embedding)

    def _qkv_down_projection(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compressed queries, and compressed keys and values with the keys' rotary part, [T of this rank, 1, ...].

        Under tensor parallelism a rank computes some columns of either. Megatron gathers those of keys and values
        later, and then each rank keeps only the gradient that its own heads give to the rotary part. Cut along the
        sequence, as the model with Transformer Engine has them, they take another way, which sums those of all heads.
        """
        queries, keys_and_values = super()._qkv_down_projection(hidden_states)
        if keys_and_values.size(-1) != self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim:
            whole = gather_from_tensor_model_parallel_region(keys_and_values)
            keys_and_values = scatter_to_sequence_parallel_region(whole)
        return queries, keys_and_values


class _AnglesOfPack(torch.nn.Module):
    """Stands in for a rotary embedding: the angles of the tokens that this rank holds, looked up by position.

    Megatron asks for the length of a batch first, which is where the pack is seen, and for the angles at once after.
    """

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self._embedding, self._positions = embedding, torch.empty(0)

    def get_rotary_seq_len(self, _context: Any, _decoder: Any, _hidden: Any, _config: Any, pack: Pack | None) -> int:
        if pack is None or pack.positions is None:
            raise SettingsError("latent attention got no pack, allowed: one pack with its boundaries.")
        self._positions = pack.positions
        return int(pack.max_seqlen_q)

    def forward(self, length: int, packed_seq: bool = False) -> Any:  # noqa: ARG002
        """[T of this rank, 1, d], and YaRN's factor where the embedding has one."""
        angles = self._embedding(length, packed_seq=True)  # never cut for context parallelism: the positions are
        if isinstance(angles, tuple):
            return angles[0][self._positions, 0], angles[1]
        return angles[self._positions, 0]
