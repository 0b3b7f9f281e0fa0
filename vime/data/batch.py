"""Packed training input: plain arrays, no framework."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class PackedMicrobatch:
    """Several sequences end to end (sequence packing, THD).

    S sequences, T tokens in all, R response tokens in all. Per-response-token arrays are concatenated in the
    order of the sequences; a sequence's response is its last `response_lengths[s]` tokens.
    """

    tokens: npt.NDArray[np.int32]
    """[T] prompt and response ids."""
    cu_seqlens: npt.NDArray[np.int32]
    """[S + 1] start of each sequence, then T."""
    response_lengths: npt.NDArray[np.int32]
    """[S]"""
    loss_mask: npt.NDArray[np.uint8]
    """[R]"""
    sampler_log_probs: npt.NDArray[np.float32]
    """[R] natural log."""
    advantages: npt.NDArray[np.float32]
    """[S] group-normalised reward; every token of a sequence shares it."""
    mask_sums: npt.NDArray[np.float32]
    """[S] number of trained tokens of the whole rollout that the sequence belongs to (its loss denominator)."""
    sample_indices: npt.NDArray[np.int64]
    """[S] `Sample.index`."""

    @property
    def num_sequences(self) -> int:
        return len(self.response_lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


class LazyMicrobatches(Sequence[PackedMicrobatch]):
    """Microbatches that are read when they are asked for; ask in order, once."""

    @property
    @abstractmethod
    def token_counts(self) -> Sequence[int]:
        """Tokens of each microbatch, known without reading it."""

    def __len__(self) -> int:
        return len(self.token_counts)


def token_counts(microbatches: Sequence[PackedMicrobatch]) -> Sequence[int]:
    """Tokens of each microbatch."""
    if isinstance(microbatches, LazyMicrobatches):
        return microbatches.token_counts
    return [microbatch.num_tokens for microbatch in microbatches]


@dataclass(frozen=True)
class StepTotals:
    """What one optimizer step sums to over all ranks; denominators of the loss."""

    num_rollouts: int
    """Rollouts in the step (`--global-batch-size`)."""
    num_trained_tokens: int
    """Sum over samples of max(number of unmasked response tokens, 1)."""
