"""What rotary embedding turns the numbers of a head by."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rotation:
    """Of each token at its place in its own sequence."""

    cosines: torch.Tensor
    """[T of this rank, rotated numbers / 2] float32"""
    sines: torch.Tensor
    """As `cosines`."""
    interleaved: bool
    """Whether neighbours are turned together, or each number of the first half with one of the second."""


def rotation_of(angles: torch.Tensor, *, interleaved: bool) -> Rotation:
    """From Megatron's angles [T, 1, 1, rotated numbers], which has each twice."""
    numbers = slice(None, None, 2) if interleaved else slice(angles.size(-1) // 2)
    once = angles[:, 0, 0, numbers]
    return Rotation(once.cos(), once.sin(), interleaved)
