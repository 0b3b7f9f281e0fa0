"""A packed microbatch as the tensors that the model and the loss read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vime.backends.megatron_utils.attention import Pack, make_pack
from vime.backends.megatron_utils.context import (
    WHOLE,
    ContextShare,
    Positions,
    find,
    padded_boundaries,
    positions_of_rank,
    token_places,
)
from vime.backends.megatron_utils.device_copy import to_device
from vime.backends.megatron_utils.further_targets import FurtherTargets, further_targets, shifted_tokens
from vime.backends.megatron_utils.head.types import Nucleus, TopKCandidates
from vime.backends.megatron_utils.recorded import recorded_tensors
from vime.backends.megatron_utils.routes import Routes, routes_of
from vime.data.batch import PackedMicrobatch


@dataclass(frozen=True)
class MicrobatchTensors:
    """Tensors of one microbatch on the training device.

    This rank's T tokens with padding, the S sequences of the microbatch, and R response tokens: those that this rank's
    tokens predict, which are all unless context parallelism shares them out.
    """

    tokens: torch.Tensor
    """[1, T] int64"""
    position_ids: torch.Tensor
    """[1, T] int64, restarts at each sequence"""
    packed: Pack
    response_rows: torch.Tensor
    """[R] int64, which of the rank's tokens predicts each response token"""
    targets: torch.Tensor
    """[R] int64, the response tokens"""
    total_lengths: torch.Tensor
    """[S] int64, prompt and response on all ranks"""
    response_lengths: torch.Tensor
    """[S] int64, sums to R"""
    whole_response_lengths: torch.Tensor
    """[S] int64, on all ranks"""
    own: torch.Tensor
    """[response tokens of the whole microbatch] bool, which are among the R"""
    loss_mask: torch.Tensor
    """[R] bool"""
    sampler_log_probs: torch.Tensor
    """[R] float32"""
    advantages: torch.Tensor
    """[R] float32"""
    mask_sums: torch.Tensor
    """[S] float32"""
    sample_indices: tuple[int, ...]
    old_log_probs: torch.Tensor | None = None
    """[R] float32"""
    old_entropies: torch.Tensor | None = None
    """[R] float32"""
    reference_log_probs: torch.Tensor | None = None
    """[R] float32"""
    teacher_log_probs: torch.Tensor | None = None
    """[R] float32"""
    values: torch.Tensor | None = None
    """[R] float32, the critic's before the batch's first step"""
    returns: torch.Tensor | None = None
    """[R] float32, what the critic learns"""
    candidates: TopKCandidates | None = None
    nucleus: Nucleus | None = None
    routes: Routes | None = None
    further: tuple[FurtherTargets, ...] = ()
    """Of each depth of the prediction of further tokens."""


def to_tensors(
    microbatch: PackedMicrobatch,
    device: torch.device,
    share: ContextShare = WHOLE,
    rank_multiple: int = 1,
    num_further: int = 0,
) -> MicrobatchTensors:
    """Move this rank's share of a microbatch to `device`, with a multiple of `rank_multiple` tokens.

    With what `num_further` layers for further tokens need.
    """
    boundaries = padded_boundaries(np.diff(microbatch.cu_seqlens).tolist(), share, rank_multiple)
    tokens, places = _padded_tokens(microbatch, boundaries)
    positions = np.arange(len(tokens)) - np.repeat(boundaries[:-1], np.diff(boundaries))
    held = positions_of_rank(boundaries, share)
    predictors = _response_rows(microbatch)
    own, rows = find(places[predictors], held)
    lengths = microbatch.response_lengths.astype(np.int64)

    def move(array: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
        return to_device(torch.tensor(array, dtype=dtype), device)

    def move_own(array: npt.NDArray[np.float32]) -> torch.Tensor:
        return move(array[own], torch.float32)

    def move_if_given(array: npt.NDArray[np.float32] | None) -> torch.Tensor | None:
        return None if array is None else move_own(array)

    advantages = microbatch.token_advantages
    if advantages is None:
        advantages = np.repeat(microbatch.advantages, lengths)

    candidates, nucleus = recorded_tensors(microbatch, device, own)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    depths = range(1, 1 + num_further)
    shifted = [shifted_tokens(microbatch, places, len(tokens), depth)[held] for depth in depths]
    return MicrobatchTensors(
        tokens=move(tokens[held][None], torch.int64),
        position_ids=move(positions[held][None], torch.int64),
        packed=make_pack(boundaries, share, device, tuple(move(each[None], torch.int64) for each in shifted)),
        response_rows=move(rows, torch.int64),
        targets=move(microbatch.tokens[predictors[own] + 1], torch.int64),
        total_lengths=move(np.diff(microbatch.cu_seqlens), torch.int64),
        response_lengths=move(np.bincount(sequence[own], minlength=len(lengths)), torch.int64),
        whole_response_lengths=move(lengths, torch.int64),
        own=move(own, torch.bool),
        loss_mask=move(microbatch.loss_mask[own], torch.bool),
        sampler_log_probs=move_own(microbatch.sampler_log_probs),
        advantages=move_own(advantages),
        mask_sums=move(microbatch.mask_sums, torch.float32),
        sample_indices=tuple(int(index) for index in microbatch.sample_indices),
        old_log_probs=move_if_given(microbatch.old_log_probs),
        old_entropies=move_if_given(microbatch.old_entropies),
        reference_log_probs=move_if_given(microbatch.reference_log_probs),
        teacher_log_probs=move_if_given(microbatch.teacher_log_probs),
        values=move_if_given(microbatch.values),
        returns=move_if_given(microbatch.token_returns),
        candidates=candidates,
        nucleus=nucleus,
        routes=routes_of(microbatch, places, held),
        further=tuple(further_targets(microbatch, predictors, places, held, depth, device) for depth in depths),
    )


def _padded_tokens(microbatch: PackedMicrobatch, boundaries: Positions) -> tuple[npt.NDArray[np.int64], Positions]:
    """(tokens of the padded pack, place in it of each of the microbatch's tokens)."""
    places = token_places(np.diff(microbatch.cu_seqlens).tolist(), boundaries)
    tokens = np.zeros(int(boundaries[-1]), np.int64)
    tokens[places] = microbatch.tokens
    return tokens, places


def _response_rows(microbatch: PackedMicrobatch) -> npt.NDArray[np.int64]:
    """[R]: a response token at position p of the pack is predicted at p - 1."""
    ends = microbatch.cu_seqlens[1:].astype(np.int64)
    spans = [
        np.arange(end - length - 1, end - 1)
        for end, length in zip(ends, microbatch.response_lengths.astype(np.int64), strict=True)
    ]
    return np.concatenate([np.zeros(0, np.int64), *spans])
