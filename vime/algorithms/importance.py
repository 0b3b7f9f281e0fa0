"""Weights that correct for tokens sampled by another policy than the one that is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch

from vime.errors import SettingsError


class WeightKind(Enum):
    """Which function of the trainer / sampler ratio a token is weighted by."""

    NONE = "none"
    TIS = "tis"
    ICEPOP = "icepop"


@dataclass(frozen=True)
class WeightRule:
    """The rule f by which a ratio r = p / q of trainer to sampler probability becomes a weight.

    NONE: f(r) = 1. TIS (truncated importance sampling): f(r) = min(max(r, low), high). ICEPOP: f(r) = r where
    low <= r <= high, else 0. Raises `SettingsError` for bounds that aren't 0 <= low <= high, 0 < high, finite.

    Sources: TIS: fengyao.notion.site/off-policy-rl; IcePop: arXiv 2510.18855; f inside score centering:
    arXiv 2609.20807.
    """

    kind: WeightKind = WeightKind.NONE
    low: float = 0.0
    high: float = 2.0

    def __post_init__(self) -> None:
        finite = math.isfinite(self.low) and math.isfinite(self.high)
        if not (finite and 0.0 <= self.low <= self.high and self.high > 0.0):
            raise SettingsError(
                f"bounds of the importance weight are {self.low} and {self.high}, "
                "allowed: finite, 0 <= lower <= upper, upper above 0.",
                next_step="Correct --tis-clip-low and --tis-clip.",
            )

    def __call__(self, ratio: torch.Tensor) -> torch.Tensor:
        """f of each element of `ratio` (any shape, not negative; infinity allowed), same shape and dtype."""
        if self.kind is WeightKind.NONE:
            return torch.ones_like(ratio)
        if self.kind is WeightKind.TIS:
            return ratio.clamp(self.low, self.high)
        return ratio.where((ratio >= self.low) & (ratio <= self.high), 0.0)


@dataclass(frozen=True)
class ImportanceWeights:
    """Each [R], without gradient."""

    weights: torch.Tensor
    """f(ratio)"""
    ratio: torch.Tensor
    """Trainer over sampler probability."""

    def metrics(self) -> dict[str, torch.Tensor]:
        """What is reported about each token [R]: the ratio, whether the rule changed it, its distance from 1."""
        return {
            "tis": self.ratio,
            "tis_clipfrac": (self.weights != self.ratio).to(self.ratio.dtype),
            "tis_abs": (self.ratio - 1.0).abs(),
        }


def importance_weights(
    train_log_probs: torch.Tensor, sampler_log_probs: torch.Tensor, rule: WeightRule
) -> ImportanceWeights:
    """Weight of each token from its log-probability in trainer and sampler, both [R]; nothing carries a gradient."""
    ratio = (train_log_probs.detach() - sampler_log_probs.detach()).exp()
    return ImportanceWeights(rule(ratio), ratio)
