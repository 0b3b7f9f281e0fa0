"""A packed microbatch as the tensors that the model and the loss read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from vime.backends.megatron_utils.head.types import Nucleus, TopKCandidates
from vime.backends.megatron_utils.model import pack_params
from vime.backends.megatron_utils.recorded import recorded_tensors
from vime.data.batch import PackedMicrobatch


@dataclass(frozen=True)
class MicrobatchTensors:
    """Tensors of one microbatch on the training device; T tokens with padding, S sequences, R response tokens."""

    tokens: torch.Tensor
    """[1, T] int64"""
    position_ids: torch.Tensor
    """[1, T] int64, restarts at each sequence"""
    packed: PackedSeqParams
    response_rows: torch.Tensor
    """[R] int64, position whose hidden state predicts each response token"""
    targets: torch.Tensor
    """[R] int64, the response tokens"""
    total_lengths: torch.Tensor
    """[S] int64, prompt and response"""
    response_lengths: torch.Tensor
    """[S] int64"""
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
    reference_log_probs: torch.Tensor | None = None
    """[R] float32"""
    teacher_log_probs: torch.Tensor | None = None
    """[R] float32"""
    candidates: TopKCandidates | None = None
    nucleus: Nucleus | None = None


def to_tensors(microbatch: PackedMicrobatch, device: torch.device, multiple: int = 1) -> MicrobatchTensors:
    """Move a microbatch to `device`; tokens are padded at the end, as a sequence of their own, to a `multiple`."""
    boundaries = microbatch.cu_seqlens.astype(np.int64)
    padding = -microbatch.num_tokens % multiple
    if padding:
        boundaries = np.append(boundaries, boundaries[-1] + padding)
    lengths = np.diff(boundaries)
    tokens = np.pad(microbatch.tokens.astype(np.int64), (0, padding))
    positions = np.arange(len(tokens)) - np.repeat(boundaries[:-1], lengths)
    rows = _response_rows(microbatch)

    def move(array: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(array, dtype=dtype).to(device, non_blocking=True)

    def move_if_given(array: npt.NDArray[np.float32] | None) -> torch.Tensor | None:
        return None if array is None else move(array, torch.float32)

    advantages = microbatch.token_advantages
    if advantages is None:
        advantages = np.repeat(microbatch.advantages, microbatch.response_lengths)

    candidates, nucleus = recorded_tensors(microbatch, device)
    return MicrobatchTensors(
        tokens=move(tokens[None], torch.int64),
        position_ids=move(positions[None], torch.int64),
        packed=pack_params(move(boundaries, torch.int32), int(lengths.max(initial=1))),
        response_rows=move(rows, torch.int64),
        targets=move(tokens[rows + 1], torch.int64),
        total_lengths=move(np.diff(microbatch.cu_seqlens), torch.int64),
        response_lengths=move(microbatch.response_lengths, torch.int64),
        loss_mask=move(microbatch.loss_mask, torch.bool),
        sampler_log_probs=move(microbatch.sampler_log_probs, torch.float32),
        advantages=move(advantages, torch.float32),
        mask_sums=move(microbatch.mask_sums, torch.float32),
        sample_indices=tuple(int(index) for index in microbatch.sample_indices),
        old_log_probs=move_if_given(microbatch.old_log_probs),
        reference_log_probs=move_if_given(microbatch.reference_log_probs),
        teacher_log_probs=move_if_given(microbatch.teacher_log_probs),
        candidates=candidates,
        nucleus=nucleus,
    )


def _response_rows(microbatch: PackedMicrobatch) -> npt.NDArray[np.int64]:
    """[R]: a response token at position p of the pack is predicted at p - 1."""
    ends = microbatch.cu_seqlens[1:].astype(np.int64)
    spans = [
        np.arange(end - length - 1, end - 1)
        for end, length in zip(ends, microbatch.response_lengths.astype(np.int64), strict=True)
    ]
    return np.concatenate([np.zeros(0, np.int64), *spans])
