"""Causal attention over packed sequences for Megatron-Core's local layer specification."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule

from vime.errors import SettingsError


@functools.lru_cache(maxsize=64)
def length_buckets(boundaries: tuple[int, ...]) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """Group the sequences of a pack by length, so that each group is one padded batch.

    `boundaries` is the start of each sequence, then the number of tokens T. A bucket holds the sequences whose
    lengths round up to the same power of two. Returns, per bucket, (rows [n, longest] int64: the token positions of
    its sequences, clamped to T - 1 where a sequence has ended; keep [n, longest] bool: which of them are real).
    """
    starts = torch.tensor(boundaries[:-1])
    lengths = torch.tensor(boundaries[1:]) - starts
    buckets: dict[int, list[int]] = {}
    for index, length in enumerate(lengths.tolist()):
        if length > 0:
            buckets.setdefault((length - 1).bit_length(), []).append(index)
    result = []
    for members in buckets.values():
        chosen = torch.tensor(members)
        offsets = torch.arange(int(lengths[chosen].max()))
        keep = offsets[None] < lengths[chosen][:, None]
        rows = (starts[chosen][:, None] + offsets[None]).clamp(max=boundaries[-1] - 1)
        result.append((rows, keep))
    return tuple(result)


def bucketed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, boundaries: tuple[int, ...], scale: float
) -> torch.Tensor:
    """Exact causal attention within each sequence of a pack.

    Query [T, heads, d], key and value [T, kv_heads, d]; returns [T, heads, d]. Sequences of similar length are padded
    at their end and run as one batch: a causal mask never lets a real token see the padding behind it.
    """
    grouped = query.size(1) != key.size(1)
    output = torch.zeros_like(query)
    for rows, keep in length_buckets(boundaries):
        rows, keep = rows.to(query.device), keep.to(query.device)
        q, k, v = (tensor[rows].transpose(1, 2) for tensor in (query, key, value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        output = output.index_put((rows[keep],), mixed.transpose(1, 2)[keep])
    return output


class PackedCoreAttention(MegatronModule):  # type: ignore[misc]
    """Core attention that keeps the sequences of a pack apart.

    Works on the heads of this tensor-parallel rank. On CUDA in half precision it calls torch's variable-length flash
    attention; elsewhere it batches sequences of similar length, which is exact in float32.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,  # noqa: ARG002
        attn_mask_type: Any,  # noqa: ARG002
        attention_type: str,  # noqa: ARG002
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise SettingsError(f"--attention-dropout is {dropout}, allowed with packed sequences: 0.")
        if config.context_parallel_size > 1:
            raise SettingsError(
                f"--context-parallel-size is {config.context_parallel_size}, allowed with packed attention: 1.",
                next_step="Use tensor or pipeline parallelism for this model.",
            )
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,  # noqa: ARG002
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Query [T, 1, heads, d], key and value [T, 1, kv_heads, d]; returns [T, 1, heads * d]."""
        tokens, batch = query.shape[:2]
        if packed_seq_params is None or batch != 1:
            raise SettingsError(f"packed attention got a batch of {batch} rows, allowed: one pack with its boundaries.")
        query, key, value = query[:, 0], key[:, 0], value[:, 0]
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            output = self._flash(query, key, value, packed_seq_params)
        else:
            boundaries = tuple(packed_seq_params.cu_seqlens_q.tolist())
            output = bucketed_attention(query, key, value, boundaries, self.scale)
        return output.reshape(tokens, 1, -1)

    def _flash(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSeqParams
    ) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        accepted = _varlen_parameters()
        causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in accepted else {"is_causal": True}
        if query.size(1) != key.size(1):
            if "enable_gqa" in accepted:
                causal["enable_gqa"] = True
            else:
                repeats = query.size(1) // key.size(1)
                key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        if "scale" in accepted:
            causal["scale"] = self.scale
        else:
            query = query * (self.scale * query.size(-1) ** 0.5)
        boundaries, longest = packed.cu_seqlens_q, int(packed.max_seqlen_q)
        call: Callable[..., Any] = varlen_attn
        output: torch.Tensor = call(query, key, value, boundaries, boundaries, longest, longest, **causal)
        return output


@functools.cache
def _varlen_parameters() -> frozenset[str]:
    """Keywords of `varlen_attn`, which gained some between torch releases."""
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)
