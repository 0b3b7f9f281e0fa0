"""The backward pass of the head: logits are computed anew, block by block, and turned into their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from vime.backends.megatron_utils.fused.rule import has_kernels
from vime.backends.megatron_utils.head.forward import Evaluation
from vime.backends.megatron_utils.head.grid import Grid, GridEntries
from vime.backends.megatron_utils.head.projection import Bf16Parts, projection_of
from vime.backends.megatron_utils.head.scores import Score
from vime.backends.megatron_utils.head.types import HeadOptions


@dataclass(frozen=True)
class LogitGradient:
    """Gradient of the undivided logits x = T z: e (factor - slope z) at every entry, e = exp(z - maximum), plus
    `at_entry` at the recorded ones."""

    factor: torch.Tensor
    """[R] float32"""
    slope: torch.Tensor | None
    """[R] float32; None for zeros"""
    at_entry: torch.Tensor
    """[R + N] float32, in the order of `RecordedEntries`"""
    is_active: torch.Tensor
    """[R] bool: rows whose gradient isn't zero throughout"""

    def of_rows(self, rows: torch.Tensor) -> BlockGradient:
        """Without the single entries, of some rows by their numbers [r] int64."""
        return BlockGradient(self.factor[rows], None if self.slope is None else self.slope[rows])


@dataclass(frozen=True)
class BlockGradient:
    """e (factor - slope z) of `LogitGradient`."""

    factor: torch.Tensor
    """[R] float32"""
    slope: torch.Tensor | None
    """[R] float32; None for zeros"""

    def block(self, logits: torch.Tensor, rows: slice, maximum: torch.Tensor) -> torch.Tensor:
        """[r, columns] for `logits` [r, columns] of some rows, which it may overwrite; `maximum` is of all rows."""
        factor, slope = self.factor[rows], None if self.slope is None else self.slope[rows]
        if has_kernels(logits):
            from vime.backends.megatron_utils.fused.softmax import gradients_in_place

            return gradients_in_place(logits, maximum[rows], factor, slope)
        if slope is None:
            return logits.sub_(maximum[rows, None]).exp_().mul_(factor[:, None])
        exponentials = (logits - maximum[rows, None]).exp_()
        return logits.mul_(-slope[:, None]).add_(factor[:, None]).mul_(exponentials)


def logit_gradient(
    found: Evaluation,
    options: HeadOptions,
    log_prob: torch.Tensor | None,
    entropy: torch.Tensor | None,
    correction: torch.Tensor | None,
) -> LogitGradient:
    """From the gradients [R] of the head's values; None for zeros."""
    rows = found.entries.rows
    num_rows = len(found.maximum)
    factor, at_entry = torch.zeros_like(found.maximum), torch.zeros(len(rows), device=rows.device)
    is_active = torch.zeros(num_rows, dtype=torch.bool, device=rows.device)
    scores: list[tuple[Score, torch.Tensor | None]] = [(found.log_prob, log_prob)]
    if found.centering is not None:
        scores.append((found.centering.correction, correction))
    for score, gradient in scores:
        if gradient is None:
            continue
        is_active |= gradient != 0
        if score.softmax_factor is not None:
            factor += gradient * score.softmax_factor
        if score.at_target is not None:
            at_entry[:num_rows] += gradient * score.at_target
        if score.at_recorded is not None:
            at_entry[num_rows:] += gradient[rows[num_rows:]] * score.at_recorded
    slope = None
    if entropy is not None and found.entropy is not None:
        is_active |= entropy != 0
        factor += entropy * (found.maximum + found.total.log() - found.entropy)
        slope = entropy / (found.total * options.temperature)
    factor /= found.total * options.temperature
    return LogitGradient(factor, slope, at_entry / options.temperature, is_active)


def propagate(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    found: Evaluation,
    options: HeadOptions,
    gradient: LogitGradient,
    *,
    to_hidden: bool,
    to_weight: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of hidden states [R, H] and weights, where wanted. Rows without a gradient cost nothing."""
    active = gradient.is_active.nonzero()[:, 0]
    grid = Grid(len(active), found.shard.size, options.chunk_rows, options.tile_columns)
    projection = projection_of(hidden if len(active) == len(hidden) else hidden[active], weight, fp32=options.fp32)
    fused = found.entries.are_targets and has_kernels(hidden) and projection.takes_parts(weight)
    blocks: _Blocks = (_TargetBlocks if fused else _EntryBlocks)(grid, gradient, found, active)
    grad_weight = torch.zeros_like(weight) if to_weight else None
    grad_active = torch.zeros(projection.hidden.shape, device=hidden.device) if to_hidden else None
    for tile, columns in grid.tiles():
        grad_tile = None if grad_weight is None else grad_weight[columns].float()
        for chunk, rows in grid.chunks():
            logits = projection.logits(rows, weight[columns], options.temperature)
            block = blocks.gradient(logits, (tile, columns), (chunk, rows))
            projection.add_gradients(rows, block, weight[columns], to_hidden=grad_active, to_tile=grad_tile)
        if grad_weight is not None and grad_tile is not None and grad_weight.dtype != torch.float32:
            grad_weight[columns] = grad_tile
    if grad_active is None:
        return None, grad_weight
    return torch.zeros_like(hidden).index_copy_(0, active, grad_active.to(hidden.dtype)), grad_weight


class _Blocks(Protocol):
    def gradient(
        self, logits: torch.Tensor, tile: tuple[int, slice], chunk: tuple[int, slice]
    ) -> torch.Tensor | Bf16Parts:
        """Of a block of logits [r, columns], by the numbers and places of its columns and of its active rows.

        May overwrite the logits.
        """


class _EntryBlocks:
    """Adds what belongs to single entries after the rest."""

    def __init__(self, grid: Grid, gradient: LogitGradient, found: Evaluation, active: torch.Tensor) -> None:
        self._gradient, self._entries = gradient.of_rows(active), _active_entries(grid, found, active)
        self._at_entry, self._maximum = gradient.at_entry, found.maximum[active]

    def gradient(self, logits: torch.Tensor, tile: tuple[int, slice], chunk: tuple[int, slice]) -> torch.Tensor:
        block = self._gradient.block(logits, chunk[1], self._maximum)
        numbers, places = self._entries.of_block(tile[0], chunk[0])
        block.view(-1).index_add_(0, places, self._at_entry[numbers])
        return block


class _TargetBlocks:
    """By one kernel for each block, where targets are all that is recorded."""

    def __init__(self, _: Grid, gradient: LogitGradient, found: Evaluation, active: torch.Tensor) -> None:
        self._gradient, self._maximum = gradient.of_rows(active), found.maximum[active]
        self._at_target = gradient.at_entry[active]
        self._targets = found.shard.local(found.entries.ids)[0][active]

    def gradient(self, logits: torch.Tensor, tile: tuple[int, slice], chunk: tuple[int, slice]) -> Bf16Parts:
        from vime.backends.megatron_utils.fused.softmax import gradient_parts

        rows, slope = chunk[1], self._gradient.slope
        return Bf16Parts(
            gradient_parts(
                logits,
                self._maximum[rows],
                self._gradient.factor[rows],
                None if slope is None else slope[rows],
                self._targets[rows] - tile[1].start,
                self._at_target[rows],
            )
        )


def _active_entries(grid: Grid, found: Evaluation, active: torch.Tensor) -> GridEntries:
    """Entries in the active rows, which are numbered anew."""
    number = torch.full_like(found.maximum, -1, dtype=torch.int64)
    number[active] = torch.arange(len(active), device=active.device)
    rows = number[found.entries.rows]
    columns, inside = found.shard.local(found.entries.ids)
    return GridEntries(grid, rows, columns, inside & (rows >= 0))
