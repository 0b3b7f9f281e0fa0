"""SwiGLU of gates and linear parts that lie side by side, forward and backward pass a kernel each."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def swiglu(values: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gates) * linear parts [..., F] of `values` [..., 2 F], and times `scales` [rows] where there are any."""
    gated: torch.Tensor = _SwiGLU.apply(values, scales)
    return gated


@triton.jit
def _swiglu_forward(values_ptr, scales_ptr, gated_ptr, size, SCALES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < size
        gate = tl.load(values_ptr + 2 * row * size + column, mask=inside, other=0.0).to(tl.float32)
        linear = tl.load(values_ptr + (2 * row + 1) * size + column, mask=inside, other=0.0).to(tl.float32)
        gated = gate * tl.sigmoid(gate) * linear
        if SCALES:
            gated *= tl.load(scales_ptr + row).to(tl.float32)
        tl.store(gated_ptr + row * size + column, gated, mask=inside)


@triton.jit
def _swiglu_backward(
    gradient_ptr,
    values_ptr,
    scales_ptr,
    to_values_ptr,
    to_scales_ptr,
    size,
    SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    to_scale = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < size
        gradient = tl.load(gradient_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(values_ptr + 2 * row * size + column, mask=inside, other=0.0).to(tl.float32)
        linear = tl.load(values_ptr + (2 * row + 1) * size + column, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(gate)
        if SCALES:
            to_scale += gradient * gate * share * linear
            gradient *= tl.load(scales_ptr + row).to(tl.float32)
        to_gate = gradient * linear * share * (1 + gate * (1 - share))
        tl.store(to_values_ptr + 2 * row * size + column, to_gate, mask=inside)
        tl.store(to_values_ptr + (2 * row + 1) * size + column, gradient * gate * share, mask=inside)
    if SCALES:
        tl.store(to_scales_ptr + row, tl.sum(to_scale, 0))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        size = values.size(-1) // 2
        rows = values.contiguous().view(-1, 2 * size)
        gated = rows.new_empty(len(rows), size)
        block = min(_BLOCK, triton.next_power_of_2(size))
        _swiglu_forward[(len(rows),)](rows, scales, gated, size, SCALES=scales is not None, BLOCK=block)
        ctx.save_for_backward(rows, scales)
        return gated.view(*values.shape[:-1], size)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows, scales = ctx.saved_tensors
        size = rows.size(1) // 2
        to_rows = torch.empty_like(rows)
        to_scales = None if scales is None else torch.empty_like(scales)
        block = min(_BLOCK, triton.next_power_of_2(size))
        _swiglu_backward[(len(rows),)](
            gradient.contiguous(), rows, scales, to_rows, to_scales, size, SCALES=scales is not None, BLOCK=block
        )
        return to_rows.view(*gradient.shape[:-1], 2 * size), to_scales
