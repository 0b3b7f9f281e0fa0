"""What layers for further tokens are told of a pack: the tokens that they join, and those that they are to predict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vime.backends.megatron_utils.context import Positions, find
from vime.backends.megatron_utils.device_copy import to_device
from vime.data.batch import PackedMicrobatch


@dataclass(frozen=True)
class FurtherTargets:
    """What one depth is to predict on this rank: N response tokens that are far enough from their sequence's start."""

    rows: torch.Tensor
    """[N] int64, which of the rank's tokens predicts each"""
    targets: torch.Tensor
    """[N] int64"""
    loss_mask: torch.Tensor
    """[N] bool"""
    lengths: torch.Tensor
    """[S] int64, how many of them each sequence of the microbatch has; sums to N"""


def shifted_tokens(microbatch: PackedMicrobatch, places: Positions, num_places: int, depth: int) -> Positions:
    """[num_places]: at each of the `places` the token `depth` behind it in its sequence; 0 where there is none."""
    shifted = np.zeros(num_places, np.int64)
    ends = np.repeat(microbatch.cu_seqlens[1:].astype(np.int64), np.diff(microbatch.cu_seqlens))
    number = np.arange(len(microbatch.tokens))
    inside = np.flatnonzero(number + depth < ends)
    shifted[places[inside]] = microbatch.tokens[inside + depth]
    return shifted


def further_targets(
    microbatch: PackedMicrobatch,
    predictors: npt.NDArray[np.int64],
    places: Positions,
    held: Positions,
    depth: int,
    device: torch.device,
) -> FurtherTargets:
    """Of `depth` (from 1); `predictors` are the tokens [R] before each response token, `held` this rank's places."""
    lengths = microbatch.response_lengths
    starts = np.repeat(microbatch.cu_seqlens[:-1].astype(np.int64), lengths)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    inside = np.flatnonzero(predictors - depth >= starts)
    own, rows = find(places[predictors[inside] - depth], held)
    responses = inside[own]

    def move(array: npt.NDArray[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return to_device(torch.tensor(array, dtype=dtype), device)

    return FurtherTargets(
        move(rows),
        move(microbatch.tokens[predictors[responses] + 1]),
        move(microbatch.loss_mask[responses], torch.bool),
        move(np.bincount(sequence[responses], minlength=len(lengths))),
    )
