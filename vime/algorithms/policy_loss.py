"""The clipped policy objective, per token and before any reduction."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PolicyLoss:
    """Per-token terms, each float32 [R]; only `loss` carries a gradient."""

    loss: torch.Tensor
    clipped: torch.Tensor
    """1.0 where the clipped branch is the larger loss."""
    ppo_kl: torch.Tensor
    """Old minus current log-probability."""
    ois: torch.Tensor
    """Importance ratio current / old."""


def clipped_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> PolicyLoss:
    """PPO's pessimistic clipped loss of each token.

    With ratio r = exp(log_probs - old_log_probs) and advantage A the loss is
    max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A); with `eps_clip_c` (dual clip) it is at most -eps_clip_c A
    where A is negative.

    Args:
        log_probs: [R] of the current policy, differentiable.
        old_log_probs: [R] of the policy that the ratio is taken against; treated as constant.
        advantages: [R] treated as constant.
        eps_clip: lower clip range.
        eps_clip_high: upper clip range; None means `eps_clip`.
        eps_clip_c: bound for negative advantages, above 1; None turns it off.

    Source: PPO (arXiv 1707.06347) equation 7; clip-higher: DAPO (arXiv 2503.14476); dual clip: arXiv 1912.09729.
    """
    high = eps_clip if eps_clip_high is None else eps_clip_high
    advantages = advantages.detach()
    ppo_kl = old_log_probs.detach() - log_probs
    ratio = (-ppo_kl).exp()
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - eps_clip, 1.0 + high) * advantages
    loss = torch.maximum(unclipped, clipped)
    if eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return PolicyLoss(
        loss=loss, clipped=(clipped > unclipped).float().detach(), ppo_kl=ppo_kl.detach(), ois=ratio.detach()
    )
