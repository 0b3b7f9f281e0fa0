"""Norms and rotary embedding of queries and keys in one pass over the product that they are parts of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from vime.backends.megatron_utils.fused.rotation import Rotation
from vime.backends.megatron_utils.fused.rule import num_programs

_MOST_HEADS = 32
"""Of one token that a program has at once."""


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorms over the d numbers of a head."""

    queries: torch.Tensor
    """[d]"""
    keys: torch.Tensor
    """[d]"""
    eps: float


def rotated_heads(
    mixed: torch.Tensor, rotation: Rotation, *, groups: int, size: int, norms: HeadNorms | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [T, heads, d], normed and rotated, keys [T, groups, d] likewise, and values [T, groups, d].

    Args:
        mixed: [T, groups * (queries of a group + 2) * d]; for each group its queries, a key and a value.
        rotation: Of each token's own position; the numbers of a head beyond those that are rotated stay as they are.
        groups: Heads of keys on this rank.
        size: d.
        norms: None for models without.
    """
    weights = (None, None) if norms is None else (norms.queries, norms.keys)
    eps = 0.0 if norms is None else norms.eps
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _RotatedHeads.apply(
        mixed, *weights, rotation.cosines, rotation.sines, rotation.interleaved, groups, size, eps
    )
    return parts


@triton.jit
def _heads_forward(
    mixed_ptr,
    cosines_ptr,
    sines_ptr,
    query_weight_ptr,
    key_weight_ptr,
    queries_ptr,
    keys_ptr,
    values_ptr,
    eps,
    GROUPS: tl.constexpr,
    QUERIES: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORMS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)[:, None]
    column = tl.arange(0, SIZE_BLOCK)[None, :]
    group, place = head // (QUERIES + 2), head % (QUERIES + 2)
    inside = (head < GROUPS * (QUERIES + 2)) & (column < SIZE)
    rotates = column < 2 * HALF
    if INTERLEAVED:
        first, angle = column % 2 == 0, column // 2
        partner = tl.where(rotates, tl.where(first, column + 1, column - 1), column)
    else:
        first = column < HALF
        angle = tl.where(first, column, column - HALF)
        partner = tl.where(first, column + HALF, tl.where(rotates, column - HALF, column))

    start = mixed_ptr + token * (GROUPS * (QUERIES + 2) * SIZE) + head * SIZE
    given = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
    own = given
    other = tl.load(start + partner, mask=inside, other=0.0).to(tl.float32)
    if NORMS:
        inverse = tl.rsqrt(tl.sum(given * given, 1) / SIZE + eps)[:, None]
        is_query = place < QUERIES
        fits = column < SIZE
        weight = tl.where(
            is_query,
            tl.load(query_weight_ptr + column, mask=fits, other=0.0).to(tl.float32),
            tl.load(key_weight_ptr + column, mask=fits, other=0.0).to(tl.float32),
        )
        other_weight = tl.where(
            is_query,
            tl.load(query_weight_ptr + partner, mask=fits, other=0.0).to(tl.float32),
            tl.load(key_weight_ptr + partner, mask=fits, other=0.0).to(tl.float32),
        )
        own *= inverse * weight
        other *= inverse * other_weight
    cosine = tl.load(cosines_ptr + token * HALF + angle, mask=rotates, other=1.0)
    sine = tl.load(sines_ptr + token * HALF + angle, mask=rotates, other=0.0)
    turned = own * cosine + other * tl.where(first, -sine, sine)

    query = token * (GROUPS * QUERIES * SIZE) + (group * QUERIES + place) * SIZE + column
    key = token * (GROUPS * SIZE) + group * SIZE + column
    tl.store(queries_ptr + query, turned, mask=inside & (place < QUERIES))
    tl.store(keys_ptr + key, turned, mask=inside & (place == QUERIES))
    tl.store(values_ptr + key, given, mask=inside & (place == QUERIES + 1))


@triton.jit
def _heads_backward(
    to_queries_ptr,
    to_keys_ptr,
    to_values_ptr,
    mixed_ptr,
    cosines_ptr,
    sines_ptr,
    query_weight_ptr,
    key_weight_ptr,
    to_mixed_ptr,
    to_weights_ptr,
    num_tokens,
    eps,
    GROUPS: tl.constexpr,
    QUERIES: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORMS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)[:, None]
    column = tl.arange(0, SIZE_BLOCK)[None, :]
    group, place = head // (QUERIES + 2), head % (QUERIES + 2)
    inside = (head < GROUPS * (QUERIES + 2)) & (column < SIZE)
    is_query, is_key, is_value = place < QUERIES, place == QUERIES, place == QUERIES + 1
    rotates = column < 2 * HALF
    if INTERLEAVED:
        first, angle = column % 2 == 0, column // 2
        partner = tl.where(rotates, tl.where(first, column + 1, column - 1), column)
    else:
        first = column < HALF
        angle = tl.where(first, column, column - HALF)
        partner = tl.where(first, column + HALF, tl.where(rotates, column - HALF, column))
    if NORMS:
        fits = column < SIZE
        weight = tl.where(
            is_query,
            tl.load(query_weight_ptr + column, mask=fits, other=0.0).to(tl.float32),
            tl.load(key_weight_ptr + column, mask=fits, other=0.0).to(tl.float32),
        )
        to_weights = tl.zeros((HEADS_BLOCK, SIZE_BLOCK), tl.float32)

    for token in range(program, num_tokens, tl.num_programs(0)):
        query = token * (GROUPS * QUERIES * SIZE) + (group * QUERIES + place) * SIZE
        key = token * (GROUPS * SIZE) + group * SIZE
        own = tl.load(to_queries_ptr + query + column, mask=inside & is_query, other=0.0).to(tl.float32)
        own += tl.load(to_keys_ptr + key + column, mask=inside & is_key, other=0.0).to(tl.float32)
        other = tl.load(to_queries_ptr + query + partner, mask=inside & is_query, other=0.0).to(tl.float32)
        other += tl.load(to_keys_ptr + key + partner, mask=inside & is_key, other=0.0).to(tl.float32)
        cosine = tl.load(cosines_ptr + token * HALF + angle, mask=rotates, other=1.0)
        sine = tl.load(sines_ptr + token * HALF + angle, mask=rotates, other=0.0)
        gradient = own * cosine + other * tl.where(first, sine, -sine)
        start = token * (GROUPS * (QUERIES + 2) * SIZE) + head * SIZE
        if NORMS:
            given = tl.load(mixed_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
            inverse = tl.rsqrt(tl.sum(given * given, 1) / SIZE + eps)[:, None]
            unit = given * inverse
            to_weights += gradient * unit  # nothing of values: their gradient was left out so far
            weighted = gradient * weight
            gradient = inverse * (weighted - unit * (tl.sum(weighted * unit, 1) / SIZE)[:, None])
        gradient += tl.load(to_values_ptr + key + column, mask=inside & is_value, other=0.0).to(tl.float32)
        tl.store(to_mixed_ptr + start + column, gradient, mask=inside)

    if NORMS:
        row = to_weights_ptr + (program * tl.num_programs(1) + tl.program_id(1)) * 2 * SIZE
        number = tl.arange(0, SIZE_BLOCK)
        tl.store(row + number, tl.sum(tl.where(is_query, to_weights, 0.0), 0), mask=number < SIZE)
        tl.store(row + SIZE + number, tl.sum(tl.where(is_key, to_weights, 0.0), 0), mask=number < SIZE)


class _RotatedHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixed: torch.Tensor,
        query_weight: torch.Tensor | None,
        key_weight: torch.Tensor | None,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        interleaved: bool,
        groups: int,
        size: int,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mixed = mixed.contiguous()
        tokens, heads = len(mixed), mixed.size(1) // size
        queries = mixed.new_empty(tokens, heads - 2 * groups, size)
        keys, values = mixed.new_empty(tokens, groups, size), mixed.new_empty(tokens, groups, size)
        shape = _shape(heads, groups, size, cosines.size(1))
        shape |= {"INTERLEAVED": interleaved, "NORMS": query_weight is not None}
        _heads_forward[(tokens, _head_blocks(heads))](
            mixed, cosines, sines, query_weight, key_weight, queries, keys, values, eps, **shape, num_warps=8
        )
        ctx.save_for_backward(None if query_weight is None else mixed, query_weight, key_weight, cosines, sines)
        ctx.shape, ctx.eps, ctx.mixed_shape = shape, eps, mixed.shape
        return queries, keys, values

    @staticmethod
    def backward(
        ctx: Any, to_queries: torch.Tensor, to_keys: torch.Tensor, to_values: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        mixed, query_weight, key_weight, cosines, sines = ctx.saved_tensors
        tokens, size = ctx.mixed_shape[0], to_keys.size(2)
        blocks = _head_blocks(ctx.mixed_shape[1] // size)
        programs = min(num_programs(to_keys.device), tokens)
        to_mixed = to_keys.new_empty(ctx.mixed_shape)
        to_weights = cosines.new_empty(programs * blocks, 2, size)
        _heads_backward[(programs, blocks)](
            to_queries.contiguous(),
            to_keys.contiguous(),
            to_values.contiguous(),
            mixed,
            cosines,
            sines,
            query_weight,
            key_weight,
            to_mixed,
            to_weights,
            tokens,
            ctx.eps,
            **ctx.shape,
            num_warps=8,
        )
        if query_weight is None:
            return to_mixed, *[None] * 8
        of_queries, of_keys = to_weights.sum(0).to(query_weight.dtype)
        return to_mixed, of_queries, of_keys, *[None] * 6


def _head_blocks(heads: int) -> int:
    return -(-heads // _MOST_HEADS)


def _shape(heads: int, groups: int, size: int, half: int) -> dict[str, int | bool]:
    return {
        "GROUPS": groups,
        "QUERIES": heads // groups - 2,
        "SIZE": size,
        "HALF": half,
        "HEADS_BLOCK": min(_MOST_HEADS, triton.next_power_of_2(heads)),
        "SIZE_BLOCK": triton.next_power_of_2(size),
    }
