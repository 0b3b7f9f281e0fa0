"""What the output head makes of a block of logits: their softmax statistics, and their gradients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048


def update_statistics(
    logits: torch.Tensor,
    maximum: torch.Tensor,
    total: torch.Tensor,
    weighted: torch.Tensor | None,
    *,
    targets: torch.Tensor | None = None,
    picked: torch.Tensor | None = None,
) -> None:
    """Take more logits [r, columns] float32 into the statistics [r] float32 of `OnlineSoftmax`, in one pass.

    With `targets` [r] int64 also adds the logit at each row's column to `picked` [r] float32; a column outside of the
    block adds nothing.
    """
    rows, columns = logits.shape
    if rows == 0 or columns == 0:
        return
    _softmax_statistics[(rows,)](
        logits.contiguous(),
        maximum,
        total,
        weighted,
        targets,
        picked,
        columns,
        ENTROPY=weighted is not None,
        TARGETS=targets is not None,
        BLOCK=_BLOCK,
        num_warps=8,
    )


def gradient_parts(
    logits: torch.Tensor,
    maximum: torch.Tensor,
    factor: torch.Tensor,
    slope: torch.Tensor | None,
    targets: torch.Tensor,
    at_target: torch.Tensor,
) -> torch.Tensor:
    """[2 r, columns] bfloat16, the parts of `bf16_parts`, of the gradients of a block of logits [r, columns] float32.

    The gradient is e (factor - slope x), e = exp(x - maximum), and `at_target` more at the column of `targets` [r]
    int64, which may lie outside of the block; all else [r] float32.
    """
    parts = logits.new_empty(2 * len(logits), logits.size(1), dtype=torch.bfloat16)
    _launch(logits, maximum, factor, slope, parts, targets, at_target)
    return parts


def gradients_in_place(
    logits: torch.Tensor, maximum: torch.Tensor, factor: torch.Tensor, slope: torch.Tensor | None
) -> torch.Tensor:
    """`logits` [r, columns] float32 turned into their gradients, as in `gradient_parts` but for targets."""
    _launch(logits, maximum, factor, slope, logits, None, None)
    return logits


def _launch(
    logits: torch.Tensor,
    maximum: torch.Tensor,
    factor: torch.Tensor,
    slope: torch.Tensor | None,
    found: torch.Tensor,
    targets: torch.Tensor | None,
    at_target: torch.Tensor | None,
) -> None:
    rows, columns = logits.shape
    if rows == 0 or columns == 0:
        return
    _logit_gradients[(rows, triton.cdiv(columns, _BLOCK))](
        logits,
        maximum,
        factor,
        slope,
        targets,
        at_target,
        found,
        rows,
        columns,
        SLOPE=slope is not None,
        TARGETS=targets is not None,
        PARTS=found.dtype == torch.bfloat16,
        BLOCK=_BLOCK,
        num_warps=8,
    )


def parts_of(values: torch.Tensor) -> torch.Tensor:
    """`bf16_parts` of `values` [r, columns] float32 in one pass."""
    rows, columns = values.shape
    parts = values.new_empty(2 * rows, columns, dtype=torch.bfloat16)
    if rows and columns:
        _bf16_parts[(rows, triton.cdiv(columns, _BLOCK))](
            values.contiguous(), parts, rows, columns, BLOCK=_BLOCK, num_warps=8
        )
    return parts


@triton.jit
def _softmax_statistics(
    logits_ptr,
    maximum_ptr,
    total_ptr,
    weighted_ptr,
    targets_ptr,
    picked_ptr,
    columns,
    ENTROPY: tl.constexpr,
    TARGETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    maximum, total = tl.load(maximum_ptr + row), tl.load(total_ptr + row)
    if ENTROPY:
        weighted = tl.load(weighted_ptr + row)
    if TARGETS:
        target, picked = tl.load(targets_ptr + row), tl.load(picked_ptr + row)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + row * columns + column, mask=column < columns, other=-1e38)
        greater = tl.maximum(maximum, tl.max(logits, 0))
        change = maximum - greater
        shrink = tl.exp(change)
        below = logits - greater
        exponentials = tl.exp(below)
        if ENTROPY:
            weighted = (weighted + change * total) * shrink + tl.sum(exponentials * below, 0)
        if TARGETS:
            picked += tl.sum(tl.where((column == target) & (column < columns), logits, 0.0), 0)
        total = total * shrink + tl.sum(exponentials, 0)
        maximum = greater
    tl.store(maximum_ptr + row, maximum)
    tl.store(total_ptr + row, total)
    if ENTROPY:
        tl.store(weighted_ptr + row, weighted)
    if TARGETS:
        tl.store(picked_ptr + row, picked)


@triton.jit
def _logit_gradients(
    logits_ptr,
    maximum_ptr,
    factor_ptr,
    slope_ptr,
    targets_ptr,
    at_target_ptr,
    found_ptr,
    rows,
    columns,
    SLOPE: tl.constexpr,
    TARGETS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    logits = tl.load(logits_ptr + row * columns + column, mask=inside, other=0.0)
    factor = tl.load(factor_ptr + row)
    if SLOPE:
        factor = factor - tl.load(slope_ptr + row) * logits
    gradient = tl.exp(logits - tl.load(maximum_ptr + row)) * factor
    if TARGETS:
        gradient += tl.where(column == tl.load(targets_ptr + row), tl.load(at_target_ptr + row), 0.0)
    if PARTS:
        _store_parts(found_ptr, (row * columns + column, (rows + row) * columns + column), gradient, inside)
    else:
        tl.store(found_ptr + row * columns + column, gradient, mask=inside)


@triton.jit
def _bf16_parts(values_ptr, parts_ptr, rows, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    values = tl.load(values_ptr + row * columns + column, mask=inside, other=0.0)
    _store_parts(parts_ptr, (row * columns + column, (rows + row) * columns + column), values, inside)


@triton.jit
def _store_parts(parts_ptr, places, values, inside):
    rounded = values.to(tl.bfloat16)
    tl.store(parts_ptr + places[0], rounded, mask=inside)
    tl.store(parts_ptr + places[1], values - rounded.to(tl.float32), mask=inside)
