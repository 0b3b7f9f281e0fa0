"""RMSNorm, forward and backward pass a kernel each."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vime.backends.megatron_utils.fused.rule import num_programs


def rms_norm(values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., H], each row over its root mean square, times `weight` [H]."""
    normed: torch.Tensor = _RMSNorm.apply(values, weight, eps)
    return normed


@triton.jit
def _rms_norm_forward(values_ptr, weight_ptr, normed_ptr, inverse_ptr, size, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    values = tl.load(values_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / size + eps)
    tl.store(inverse_ptr + row, inverse)
    tl.store(normed_ptr + row * size + column, values * inverse * weight, mask=inside)


@triton.jit
def _rms_norm_backward(
    gradient_ptr,
    values_ptr,
    weight_ptr,
    inverse_ptr,
    to_values_ptr,
    to_weight_ptr,
    num_rows,
    size,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    to_weight = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, num_rows, tl.num_programs(0)):
        gradient = tl.load(gradient_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(values_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_ptr + row)
        unit = values * inverse
        to_weight += gradient * unit
        weighted = gradient * weight
        to_values = inverse * (weighted - unit * (tl.sum(weighted * unit, 0) / size))
        tl.store(to_values_ptr + row * size + column, to_values, mask=inside)
    tl.store(to_weight_ptr + program * size + column, to_weight, mask=inside)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        size = values.size(-1)
        rows = values.contiguous().view(-1, size)
        normed, inverse = torch.empty_like(rows), rows.new_empty(len(rows), dtype=torch.float32)
        block = triton.next_power_of_2(size)
        _rms_norm_forward[(len(rows),)](
            rows, weight, normed, inverse, size, eps, BLOCK=block, num_warps=_num_warps(block)
        )
        ctx.save_for_backward(rows, weight, inverse)
        return normed.view(values.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows, weight, inverse = ctx.saved_tensors
        size, programs = rows.size(1), min(num_programs(rows.device), len(rows))
        to_rows, to_weight = torch.empty_like(rows), inverse.new_empty(programs, size)
        block = triton.next_power_of_2(size)
        _rms_norm_backward[(programs,)](
            gradient.contiguous(),
            rows,
            weight,
            inverse,
            to_rows,
            to_weight,
            len(rows),
            size,
            BLOCK=block,
            num_warps=_num_warps(block),
        )
        return to_rows.view(gradient.shape), to_weight.sum(0).to(weight.dtype), None


def _num_warps(block: int) -> int:
    return min(16, max(1, block // 256))
