"""Whitening of advantages over all trained tokens of all ranks, from three sums."""

from __future__ import annotations

import math

import torch

from vime.algorithms.ragged import Reduce
from vime.errors import SampleError

EPSILON = 1e-8


def moment_sums(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Float64 [3]: sum of the unmasked values [R], sum of their squares, their number. Zeros for no tokens at all."""
    chosen = values[mask].double()
    return torch.stack([chosen.sum(), chosen.square().sum(), mask.sum().double()])


def whiten(values: torch.Tensor, mask: torch.Tensor, reduce: Reduce) -> torch.Tensor:
    """(x - mean) / sqrt(variance + 1e-8) with mean and Bessel-corrected variance over the trained tokens of all ranks.

    Args:
        values: [R] this rank's advantages; may be empty.
        mask: [R] bool, trained tokens.
        reduce: sum over all ranks that hold different tokens; every one of them has to call.

    Returns [R], zero where the mask is. Raises `SampleError`, on all ranks, when no rank has a trained token.
    """
    total, squares, count = reduce(moment_sums(values, mask)).tolist()
    if count == 0:
        raise SampleError(
            "advantages can't be whitened: no token of the batch is trained, allowed: at least one.",
            next_step="Look at the loss masks of the batch.",
        )
    mean = total / count
    variance = max(squares - total * mean, 0.0) / max(count - 1, 1)
    whitened: torch.Tensor = (values.double() - mean) / math.sqrt(variance + EPSILON)
    return whitened.where(mask, 0.0).to(values.dtype)
