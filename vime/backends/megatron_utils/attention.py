"""Causal attention over packed sequences for Megatron-Core's local layer specification."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule

from vime.backends.megatron_utils.context import ContextShare, Positions, QueryRun, gathered_order, query_runs
from vime.backends.megatron_utils.device_copy import to_device
from vime.backends.megatron_utils.fused.rotation import Rotation
from vime.errors import SettingsError


@dataclass
class Pack(PackedSeqParams):  # type: ignore[misc]
    """Boundaries of a pack as Megatron carries them, and which of its tokens this rank holds.

    The layout is named "sbhd" because hidden states stay [T, 1, H] throughout; see `PackedGPTModel`.
    """

    runs: tuple[QueryRun, ...] = ()
    """This rank's tokens."""
    positions: torch.Tensor | None = None
    """[T of this rank] int64, the place of each token in its own sequence; the model puts it here."""
    rotation: Rotation | None = None
    """On a GPU; the model puts it here."""
    key_order: torch.Tensor | None = None
    """[T] int64, see `gathered_order`; None where this rank holds the whole pack."""
    further_tokens: tuple[torch.Tensor, ...] = ()
    """For each depth of the prediction of further tokens [1, T of this rank] int64, the tokens so far behind."""


def make_pack(
    boundaries: Positions,
    share: ContextShare,
    device: torch.device,
    further_tokens: tuple[torch.Tensor, ...] = (),
) -> Pack:
    """The pack with these boundaries [S + 1] as the ranks of `share` hold it."""
    cu_seqlens = to_device(torch.tensor(boundaries, dtype=torch.int32), device)
    longest = int(np.diff(boundaries).max(initial=1))
    order = None
    if share.size > 1:
        order = to_device(torch.tensor(gathered_order(boundaries, share)), device)
    return Pack(
        qkv_format="sbhd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        runs=query_runs(boundaries, share),
        key_order=order,
        further_tokens=further_tokens,
    )


@dataclass(frozen=True)
class RunBucket:
    """Runs of similar size as one padded batch of n; padding repeats the last token of its run."""

    query_rows: torch.Tensor
    """[n, longest] int64"""
    keep: torch.Tensor
    """[n, longest] bool, which of them are real"""
    key_rows: torch.Tensor
    """[n, longest] int64"""
    visible: torch.Tensor | None
    """[n, 1, queries, keys] bool; None where every run sees as many keys as it has queries (causal from its start)."""


@functools.lru_cache(maxsize=64)
def run_buckets(runs: tuple[QueryRun, ...]) -> tuple[RunBucket, ...]:
    """Group runs whose numbers of queries and keys round up to the same powers of two."""
    groups: dict[tuple[int, int, bool], list[QueryRun]] = {}
    for run in runs:
        is_square = run.num_queries == run.num_keys
        size = (run.num_queries - 1).bit_length(), (run.num_keys - 1).bit_length()
        groups.setdefault((*size, is_square), []).append(run)
    return tuple(_bucket(members, is_square) for (_, _, is_square), members in groups.items())


def _bucket(runs: list[QueryRun], is_square: bool) -> RunBucket:
    sizes = [[run.query_start, run.num_queries, run.key_start, run.num_keys] for run in runs]
    query_start, num_queries, key_start, num_keys = torch.tensor(sizes).T[:, :, None]
    query, key = torch.arange(int(num_queries.max())), torch.arange(int(num_keys.max()))
    query = query.minimum(num_queries - 1)
    visible = None if is_square else key <= (num_keys - num_queries + query)[:, :, None]
    return RunBucket(
        query_rows=query_start + query,
        keep=torch.arange(query.size(1)) < num_queries,
        key_rows=key_start + key.minimum(num_keys - 1),
        visible=None if visible is None else visible[:, None],
    )


def bucketed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, runs: tuple[QueryRun, ...], scale: float
) -> torch.Tensor:
    """Exact causal attention of each run's queries to the keys of its sequence.

    Query [T of this rank, heads, d], key and value [T of the pack, kv_heads, d]; returns [T of this rank, heads, d],
    where the value's d, and the result's, may be another one.
    Runs of similar size run as one batch, padded at their end: a causal mask never lets a real token see the padding
    behind it.
    """
    grouped = query.size(1) != key.size(1)
    output = query.new_zeros(*query.shape[:-1], value.size(-1))
    for bucket in run_buckets(runs):
        query_rows, key_rows, keep = (
            rows.to(query.device) for rows in (bucket.query_rows, bucket.key_rows, bucket.keep)
        )
        q, k, v = query[query_rows].transpose(1, 2), key[key_rows].transpose(1, 2), value[key_rows].transpose(1, 2)
        visible = None if bucket.visible is None else bucket.visible.to(query.device)
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=visible is None, scale=scale, enable_gqa=grouped
        )
        output = output.index_put((query_rows[keep],), mixed.transpose(1, 2)[keep])
    return output


class PackedCoreAttention(MegatronModule):  # type: ignore[misc]
    """Core attention that keeps the sequences of a pack apart.

    Works on the heads of this tensor-parallel rank. Under context parallelism keys and values of the pack are
    gathered, and each rank answers its own queries. On CUDA in half precision it calls torch's variable-length flash
    attention; elsewhere it batches runs of similar size, which is exact in float32.
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
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self._context_group: dist.ProcessGroup = parallel_state.get_context_parallel_group()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,  # noqa: ARG002
        packed_seq_params: Pack | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Query [T, 1, heads, d], key and value [T, 1, kv_heads, d] of this rank; returns [T, 1, heads * d].

        The value's d may be another one, and the batch of one may be absent.
        """
        if query.dim() == 3:  # latent attention leaves out the batch of one
            query, key, value = query[:, None], key[:, None], value[:, None]
        tokens, batch = query.shape[:2]
        if packed_seq_params is None or batch != 1:
            raise SettingsError(f"packed attention got a batch of {batch} rows, allowed: one pack with its boundaries.")
        pack = packed_seq_params
        query, key, value = query[:, 0], key[:, 0], value[:, 0]
        if pack.key_order is not None:
            key, value = self._of_whole_pack(key, pack.key_order), self._of_whole_pack(value, pack.key_order)
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            output = flash_attention(query, key, value, pack.runs, self.scale)
        else:
            output = bucketed_attention(query, key, value, pack.runs, self.scale)
        return output.reshape(tokens, 1, -1)

    def _of_whole_pack(self, own: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """[T of the pack, ...] from each rank's part; gradients come back summed to the rank that holds the token."""
        gathered: torch.Tensor = gather_from_sequence_parallel_region(own.contiguous(), group=self._context_group)
        return gathered.index_select(0, order)


def flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, runs: tuple[QueryRun, ...], scale: float
) -> torch.Tensor:
    """As `bucketed_attention`, by torch's variable-length kernel, which aligns queries with the last keys."""
    from torch.nn.attention.varlen import varlen_attn

    value_dim = value.size(-1)
    if value_dim != query.size(-1):  # the kernel knows one size
        value = F.pad(value, (0, query.size(-1) - value_dim))

    accepted = _varlen_parameters()
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in accepted else {"is_causal": True}
    if query.size(1) != key.size(1):
        if "enable_gqa" in accepted:
            options["enable_gqa"] = True
        elif not _shares_key_heads(query.device):
            repeats = query.size(1) // key.size(1)
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    if "scale" in accepted:
        options["scale"] = scale
    else:
        query = query * (scale * query.size(-1) ** 0.5)
    spans = _flash_spans(runs, query.device)
    if key.size(0) != query.size(0):
        key, value = key.index_select(0, spans.key_rows), value.index_select(0, spans.key_rows)
    call: Callable[..., Any] = varlen_attn
    output: torch.Tensor = call(
        query, key, value, spans.queries, spans.keys, spans.longest_queries, spans.longest_keys, **options
    )
    return output if output.size(-1) == value_dim else output[..., :value_dim]


@dataclass(frozen=True)
class _FlashSpans:
    queries: torch.Tensor
    """[runs + 1] int32"""
    keys: torch.Tensor
    """[runs + 1] int32"""
    longest_queries: int
    longest_keys: int
    key_rows: torch.Tensor
    """[keys of all runs] int64 places in the pack"""


@functools.lru_cache(maxsize=16)
def _flash_spans(runs: tuple[QueryRun, ...], device: torch.device) -> _FlashSpans:
    queries, keys = [run.num_queries for run in runs], [run.num_keys for run in runs]
    spans = [torch.arange(run.key_start, run.key_start + run.num_keys) for run in runs]
    return _FlashSpans(
        to_device(torch.tensor(np.cumsum([0, *queries]), dtype=torch.int32), device),
        to_device(torch.tensor(np.cumsum([0, *keys]), dtype=torch.int32), device),
        max(queries, default=1),
        max(keys, default=1),
        to_device(torch.cat([torch.zeros(0, dtype=torch.int64), *spans]), device),
    )


@functools.cache
def _varlen_parameters() -> frozenset[str]:
    """Keywords of `varlen_attn`, which gained some between torch releases."""
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


@functools.cache
def _shares_key_heads(device: torch.device) -> bool:
    """Whether a `varlen_attn` without a word for it lets several heads of queries have one of keys, in both passes.

    It is asked for a few tokens, and has to give the gradients that repeated heads get.
    """
    from torch.nn.attention.varlen import varlen_attn

    chance = torch.Generator(device).manual_seed(0)
    shapes = ((16, 2, 64), (16, 1, 64), (16, 1, 64))
    leaves = [torch.randn(shape, device=device, dtype=torch.bfloat16, generator=chance) for shape in shapes]
    ends = torch.tensor([0, 16], dtype=torch.int32, device=device)
    call: Callable[..., Any] = varlen_attn
    gradients = []
    with torch.enable_grad():
        for repeats in (1, 2):
            query, key, value = (leaf.clone().requires_grad_() for leaf in leaves)
            repeated = (each.repeat_interleave(repeats, 1) for each in (key, value))
            try:
                output: torch.Tensor = call(query, *repeated, ends, ends, 16, 16)
                gradients.append(torch.autograd.grad(output.square().sum(), (query, key, value)))
            except (RuntimeError, ValueError):
                return False
    pairs = zip(*gradients, strict=True)
    return all(torch.allclose(shared, repeated, rtol=0.05, atol=0.05) for shared, repeated in pairs)
