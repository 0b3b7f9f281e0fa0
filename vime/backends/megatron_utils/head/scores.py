"""A value of each row that depends on the row's logits, with its derivative."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Score:
    """R values and how they change with the logits z [R, V], in a form that needs no matrix.

    d values[r] / d z[r, v] = softmax_factor[r] softmax(z[r])[v] + at_target[r] [v is r's target] + at_recorded[n],
    where n is the recorded entry (r, v), if there is one. None stands for zeros.
    """

    values: torch.Tensor
    """[R] float64"""
    softmax_factor: torch.Tensor | None = None
    """[R] float32"""
    at_target: torch.Tensor | None = None
    """[R] float32"""
    at_recorded: torch.Tensor | None = None
    """[N] float32"""


@dataclass(frozen=True)
class Centering:
    """Score-centering correction and the probability mass of the recorded tokens, [R] float64 each."""

    correction: Score
    train_mass: torch.Tensor
    sampler_mass: torch.Tensor


def log_prob_score(target_logits: torch.Tensor, log_total: torch.Tensor) -> Score:
    """Log-probability of the targets over the whole vocabulary; arguments [R] float64."""
    ones = torch.ones_like(target_logits, dtype=torch.float32)
    return Score(target_logits - log_total, softmax_factor=-ones, at_target=ones)
