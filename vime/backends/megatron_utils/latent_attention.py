"""Megatron-Core's multi-head latent attention over packed sequences."""

from __future__ import annotations

from typing import Any

import torch
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
