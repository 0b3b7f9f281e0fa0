"""Operations on tokens of several sequences that lie end to end: values [R] with response lengths [S], sum R."""

from __future__ import annotations

from collections.abc import Callable

import torch

SCAN_CHUNK = 128
"""Positions that `reverse_scan` resolves in one matrix product."""

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Sum of a tensor over ranks. Where gradients flow through it, its backward sums over the same ranks."""


def on_one_rank(tensor: torch.Tensor) -> torch.Tensor:
    """The `Reduce` of a single rank."""
    return tensor


def spread(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """One value per sequence [S] to each of its tokens [R]."""
    return torch.repeat_interleave(values, lengths)


def pieces(values: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    """The tokens [R] of each sequence on their own."""
    return list(torch.split(values, lengths))


def sequence_sums(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Sum of each sequence's tokens: [R] to [S]."""
    number = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths)
    return values.new_zeros(len(lengths)).index_add(0, number, values)


def masked_means(
    values: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor, reduce: Reduce = on_one_rank
) -> torch.Tensor:
    """Mean of each sequence's unmasked tokens, [R] to [S]; 0 where there are none.

    Args:
        values: [R] differentiable; values of masked tokens don't count, whatever they are.
        mask: [R] bool.
        lengths: [S] tokens of each sequence on this rank.
        reduce: sum over the ranks that hold parts of the same sequences.
    """
    total = sequence_sums(values.where(mask, 0.0), lengths)
    count = sequence_sums(mask.to(values.dtype), lengths)
    return reduce(total) / reduce(count).clamp(min=1.0)


def next_values(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Value of the following token of the same sequence, 0 after the last: [R] to [R]."""
    following = torch.cat([values[1:], values.new_zeros(1)])[: len(values)]
    ends = lengths.cumsum(0) - 1
    following[ends[lengths > 0]] = 0.0
    return following


def reverse_scan(values: torch.Tensor, lengths: torch.Tensor, decay: float, *, chunk: int = SCAN_CHUNK) -> torch.Tensor:
    """y_t = x_t + decay * y_{t+1} within each sequence, from the last token to the first: [R] to [R], same dtype.

    A chunk of positions of all sequences is one product with a triangle of powers of `decay`, so that the number of
    sequential operations is the longest length divided by `chunk`, not the longest length.
    """
    if not len(values):
        return values
    longest = int(lengths.max())
    positions = torch.arange(longest, device=values.device)
    inside = positions < lengths[:, None]
    padded = values.new_zeros(inside.shape)
    padded[inside] = values
    steps = torch.arange(min(chunk, longest), device=values.device)
    distance = (steps[None] - steps[:, None]).clamp(min=0)
    powers = torch.full_like(distance, decay, dtype=values.dtype).pow(distance).triu()
    carry = values.new_zeros(len(lengths))
    result = torch.empty_like(padded)
    for begin in reversed(range(0, longest, chunk)):
        block = padded[:, begin : begin + chunk]
        width = block.size(1)
        carried = carry[:, None] * powers[0, :width].flip(0) * decay
        result[:, begin : begin + width] = block @ powers[:width, :width].t() + carried
        carry = result[:, begin]
    return result[inside]
