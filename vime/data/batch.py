"""Packed training input: plain arrays, no framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TopKRows:
    """The sampler's k most probable tokens of each of R response tokens."""

    ids: npt.NDArray[np.int32]
    """[R, k]"""
    log_probs: npt.NDArray[np.float32]
    """[R, k] natural log, over the whole vocabulary."""


@dataclass(frozen=True)
class NucleusRows:
    """The tokens among which the sampler chose each of R response tokens (top-p), ragged."""

    ids: npt.NDArray[np.int32]
    """[N]"""
    offsets: npt.NDArray[np.int64]
    """[R + 1] start of each response token's ids, then N; a token without ids has no recorded nucleus."""
    log_probs: npt.NDArray[np.float32] | None = None
    """[N] natural log, normalised over each token's ids; only score centering needs them."""


@dataclass(frozen=True)
class RouteRows:
    """The sampler's experts for each token but the last of each of S sequences, end to end, in L layers."""

    ids: npt.NDArray[np.integer[Any]]
    """[T - S, L, K]"""
    layers: tuple[int, ...]
    """[L] numbers of the layers in the whole model, from 0; at least those that the rank holds."""
    recorded: npt.NDArray[np.bool_]
    """[S] whether a sequence has routes; the ids of one without are not looked at."""


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
    """[S] the plan's normalised reward; every token of a sequence shares it unless there are `token_advantages`."""
    mask_sums: npt.NDArray[np.float32]
    """[S] number of trained tokens of the whole rollout that the sequence belongs to (its loss denominator)."""
    sample_indices: npt.NDArray[np.int64]
    """[S] `Sample.index`."""
    token_advantages: npt.NDArray[np.float32] | None = None
    """[R] in place of `advantages`, where an estimator tells tokens apart."""
    token_returns: npt.NDArray[np.float32] | None = None
    """[R] what a critic's value of each token is compared with."""
    values: npt.NDArray[np.float32] | None = None
    """[R] the critic's value of the state before each token; None without one."""
    old_log_probs: npt.NDArray[np.float32] | None = None
    """[R] natural log, under the trainer's weights before the batch's first step; None where not computed."""
    old_entropies: npt.NDArray[np.float32] | None = None
    """[R] nats, at the same weights; None where not asked for."""
    reference_log_probs: npt.NDArray[np.float32] | None = None
    """[R] natural log, under the reference model; None without one."""
    teacher_log_probs: npt.NDArray[np.float32] | None = None
    """[R] natural log, under the teacher of on-policy distillation; None without one."""
    top_k: TopKRows | None = None
    """Candidates for score centering without top-p."""
    nucleus: NucleusRows | None = None
    """Replayed in log-probabilities; with log-probabilities of its own, score centering runs over it."""
    routes: RouteRows | None = None
    """Replayed by the routers of a mixture of experts."""

    @property
    def num_sequences(self) -> int:
        return len(self.response_lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class StepTotals:
    """What one optimizer step sums to over all ranks; denominators of the loss."""

    num_rollouts: int
    """Rollouts in the step (`--global-batch-size`)."""
    num_trained_tokens: int
    """Sum over samples of max(number of unmasked response tokens, 1)."""
