"""What the output head is asked for and what it returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class HeadOptions:
    """How hidden states become log-probabilities."""

    vocab_size: int
    """Real vocabulary; rows of the head beyond it are padding and have no probability."""
    temperature: float = 1.0
    fp32: bool = True
    """Multiply in float32 even when hidden states and weights are narrower."""
    chunk_rows: int = 2048
    """Most rows of logits that exist at once."""
    tile_columns: int = 8192
    """Most vocabulary entries of each such row that exist at once."""
    bf16: bool = False
    """Round hidden states and weights to bfloat16 first."""


@dataclass(frozen=True)
class TopKCandidates:
    """The sampler's k most probable tokens of each row, for score centering with a modelled tail."""

    ids: torch.Tensor
    """[R, k] whole numbers, distinct in a row."""
    log_probs: torch.Tensor
    """[R, k] float32, natural log, over the whole vocabulary."""


@dataclass(frozen=True)
class Nucleus:
    """The tokens among which the sampler chose (its top-p support), ragged: row r has offsets[r] to offsets[r + 1]."""

    ids: torch.Tensor
    """[N] whole numbers, distinct in a row."""
    offsets: torch.Tensor
    """[R + 1] whole numbers from 0 to N; a row without entries has no recorded nucleus."""
    log_probs: torch.Tensor | None = None
    """[N] float32, natural log, normalised over each row's entries; only score centering needs them."""


@dataclass(frozen=True)
class HeadTerms:
    """Values of each row, all [R] float32. Gradients flow through the first three."""

    log_prob: torch.Tensor
    """Natural log of the target's probability."""
    entropy: torch.Tensor | None = None
    """Nats, over the whole vocabulary."""
    sc_correction: torch.Tensor | None = None
    """Score-centering correction; its gradient is the mean score under the sampler, weighted by the rule."""
    sc_train_head_mass: torch.Tensor | None = None
    """Probability that the trainer gives to the recorded tokens, out of the whole vocabulary."""
    sc_sampler_head_mass: torch.Tensor | None = None
    """Probability that the sampler gave to the recorded tokens."""
    further: tuple[torch.Tensor, ...] = ()
    """Of each depth of the prediction of further tokens the natural log of its targets' probabilities [N]."""
