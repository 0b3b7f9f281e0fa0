"""Policy objectives, per token and before any reduction."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from vime.algorithms.ragged import Reduce, masked_means, on_one_rank, spread
from vime.errors import SettingsError


class PolicyObjective(Enum):
    """Which function of ratio and advantage is minimised."""

    PPO = "ppo"
    CISPO = "cispo"
    REINFORCE = "reinforce"


@dataclass(frozen=True)
class PolicyLossSettings:
    """Objective and clip range. Raises `SettingsError` for a range that isn't one.

    eps_clip and eps_clip_high (None: the same) give the range [1 - eps_clip, 1 + eps_clip_high] of the ratio for ppo
    and cispo; eps_clip_c, above 1, bounds ppo's loss at negative advantages (None: no dual clip).
    """

    objective: PolicyObjective = PolicyObjective.PPO
    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    eps_clip_c: float | None = None

    def __post_init__(self) -> None:
        if self.eps_clip_c is not None and not self.eps_clip_c > 1.0:
            raise SettingsError(f"eps_clip_c is {self.eps_clip_c}, allowed: above 1, or None for no dual clip.")
        if self.eps_clip < 0.0 or (self.eps_clip_high is not None and self.eps_clip_high < 0.0):
            raise SettingsError(
                f"eps_clip is {self.eps_clip} and eps_clip_high {self.eps_clip_high}, allowed: not below 0."
            )

    def clip(self, ratio: torch.Tensor) -> torch.Tensor:
        high = self.eps_clip if self.eps_clip_high is None else self.eps_clip_high
        return ratio.clamp(1.0 - self.eps_clip, 1.0 + high)


@dataclass(frozen=True)
class PolicyLoss:
    """Per-token terms, each [R]; only `loss` carries a gradient."""

    loss: torch.Tensor
    clipped: torch.Tensor
    """1.0 where clipping changes the loss (ppo) or the weight (cispo)."""
    ratio: torch.Tensor
    """Importance ratio current / old."""


def token_ppo_kl(log_probs: torch.Tensor, old_log_probs: torch.Tensor) -> torch.Tensor:
    """Old minus current log-probability of each token [R], differentiable in the current one."""
    return old_log_probs.detach() - log_probs


def sequence_ppo_kl(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    mask: torch.Tensor,
    lengths: torch.Tensor,
    reduce: Reduce = on_one_rank,
) -> torch.Tensor:
    """Mean over the sequence's trained tokens of old minus current log-probability, at each of its tokens [R].

    `mask` is bool [R], `lengths` [S]; `reduce` sums over ranks that hold parts of the same sequences. Source: GSPO
    (arXiv 2507.18071): exp(-ppo_kl) is the length-normalised ratio of the sequence.
    """
    return spread(masked_means(token_ppo_kl(log_probs, old_log_probs), mask, lengths, reduce), lengths)


def policy_loss(
    log_probs: torch.Tensor, ppo_kl: torch.Tensor, advantages: torch.Tensor, settings: PolicyLossSettings
) -> PolicyLoss:
    """Loss of each token under the objective of `settings`.

    With ratio r = exp(-ppo_kl) and advantage A:
    ppo: max(-r A, -clip(r) A); with a dual clip at most -eps_clip_c A where A is negative;
    cispo: -sg(clip(r)) A log p, every token keeps a gradient;
    reinforce: -A log p.

    Args:
        log_probs: [R] of the current policy, differentiable.
        ppo_kl: [R] from `token_ppo_kl` or `sequence_ppo_kl`, differentiable.
        advantages: [R] treated as constant.

    Sources: PPO (arXiv 1707.06347) equation 7; clip-higher: DAPO (arXiv 2503.14476); dual clip: arXiv 1912.09729;
    CISPO: MiniMax-M1 (arXiv 2506.13585).
    """
    advantages = advantages.detach()
    ratio = (-ppo_kl).exp()
    detached = ratio.detach()
    if settings.objective is PolicyObjective.REINFORCE:
        return PolicyLoss(-advantages * log_probs, torch.zeros_like(detached), detached)
    if settings.objective is PolicyObjective.CISPO:
        weight = settings.clip(detached)
        return PolicyLoss(-weight * advantages * log_probs, (weight != detached).to(detached.dtype), detached)
    unclipped = -ratio * advantages
    clipped = -settings.clip(ratio) * advantages
    loss = torch.maximum(unclipped, clipped)
    if settings.eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -settings.eps_clip_c * advantages), loss)
    return PolicyLoss(loss, (clipped > unclipped).to(detached.dtype).detach(), detached)


def kept_by_sequence_mask(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    lengths: torch.Tensor,
    *,
    delta: float,
    reduce: Reduce = on_one_rank,
) -> torch.Tensor:
    """Off-policy sequence masking (OPSM): bool [R], False where a token is dropped from the objective.

    Dropped are trained tokens with a negative advantage in sequences whose mean old minus current log-probability
    exceeds `delta`. Arguments as in `sequence_ppo_kl`. Source: DeepSeek-V3.2 (arXiv 2512.02556).
    """
    drift = sequence_ppo_kl(log_probs.detach(), old_log_probs, mask, lengths, reduce)
    return ~(mask & (advantages < 0) & (drift > delta))


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, value_clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The critic's loss of each token, and 1.0 where its value moved further than `value_clip`.

    max((v_clip - R)^2, (v - R)^2) with v_clip = v_old + clamp(v - v_old, -value_clip, value_clip), without a factor
    1/2. All [R]; `values` is differentiable, the others are treated as constant.
    """
    old_values, returns = old_values.detach(), returns.detach()
    moved = values - old_values
    bounded = old_values + moved.clamp(-value_clip, value_clip)
    loss = torch.maximum((bounded - returns).square(), (values - returns).square())
    return loss, (moved.abs() > value_clip).to(values.dtype).detach()


def supervised_loss(log_probs: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of each token [R], for supervised fine-tuning."""
    return -log_probs
