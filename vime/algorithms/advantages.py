"""Advantages of response tokens, on tensors of several sequences that lie end to end.

S sequences, R response tokens; `lengths` [S] int64 sums to R. Group-relative estimators (grpo, gspo, cispo) need
nothing from here but `spread`: each token's advantage is the sequence's normalised reward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vime.algorithms.ragged import SCAN_CHUNK, next_values, reverse_scan, sequence_sums, spread


@dataclass(frozen=True)
class Advantages:
    """Both float32 [R], without gradient. Where there is no critic, returns equal advantages."""

    advantages: torch.Tensor
    returns: torch.Tensor


def reinforce_plus_plus(
    rewards: torch.Tensor,
    kl: torch.Tensor,
    mask: torch.Tensor,
    lengths: torch.Tensor,
    *,
    kl_coef: float,
    gamma: float,
) -> Advantages:
    """Discounted return of each token: the reward comes at the last trained token, the KL penalty at each trained one.

    Args:
        rewards: [S] raw reward of each sequence.
        kl: [R] KL estimate of each token; not read where the mask is zero.
        mask: [R] bool, trained tokens. A sequence without any gets zeros.
        kl_coef: weight of the penalty.
        gamma: discount of the following token's return.

    The advantages are meant to be whitened over the batch. Source: REINFORCE++ (arXiv 2501.03262), section 3.
    """
    token_rewards = -kl_coef * kl.double().where(mask, 0.0)
    token_rewards += spread(rewards.double(), lengths).where(_last_trained(mask, lengths), 0.0)
    returns = reverse_scan(token_rewards, lengths, gamma).float()
    return Advantages(returns, returns)


def reinforce_plus_plus_baseline(
    centred_rewards: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor, *, kl_coef: float
) -> Advantages:
    """Centred reward of the sequence minus the KL penalty of the token.

    Args:
        centred_rewards: [S] reward minus the mean of its group.
        kl: [R] KL estimate of each token; not read where the mask is zero.
        mask: [R] bool, trained tokens.
        kl_coef: weight of the penalty.

    The advantages are meant to be whitened over the batch. Source: REINFORCE++ (arXiv 2501.03262), the variant with a
    group baseline.
    """
    advantages = spread(centred_rewards.double(), lengths) - kl_coef * kl.double().where(mask, 0.0)
    return Advantages(advantages.float(), advantages.float())


def generalized_advantages(
    rewards: torch.Tensor,
    kl: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    lengths: torch.Tensor,
    *,
    kl_coef: float,
    gamma: float,
    lambd: float,
    chunk: int = SCAN_CHUNK,
) -> Advantages:
    """Generalised advantage estimation (ppo): the reward comes at the last response token, masked or not.

    delta_t = r_t + gamma V_{t+1} - V_t with V = 0 after the end, A_t = delta_t + gamma lambd A_{t+1}, returns = A + V.

    Args:
        rewards: [S] raw reward of each sequence.
        kl: [R] KL estimate of each token; not read where the mask is zero.
        values: [R] the critic's value of the state before each token, masked tokens included: they are states that
            later rewards pass through.
        mask: [R] bool, trained tokens.
        kl_coef: weight of the KL penalty, which is taken from the reward of each trained token.
        gamma: discount of rewards.
        lambd: 0 trusts the critic, 1 the observed rewards.
        chunk: positions resolved at once; the result doesn't depend on it.

    Source: GAE (arXiv 1506.02438), equations 11 and 16.
    """
    value = values.double()
    token_rewards = -kl_coef * kl.double().where(mask, 0.0)
    ends = (lengths.cumsum(0) - 1)[lengths > 0]
    token_rewards[ends] += rewards.double()[lengths > 0]
    delta = token_rewards + gamma * next_values(value, lengths) - value
    advantages = reverse_scan(delta, lengths, gamma * lambd, chunk=chunk)
    return Advantages(advantages.float(), (advantages + value).float())


def distilled(
    advantages: torch.Tensor, student_log_probs: torch.Tensor, teacher_log_probs: torch.Tensor, *, coef: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """On-policy distillation: subtract the reverse KL to a teacher from the advantages.

    All [R]; the log-probabilities are those of the sampled tokens. Returns (advantages - coef * reverse KL, reverse
    KL). Applied after the estimator and before whitening. Source: arXiv 2306.13649, with the reverse KL as a reward.
    """
    reverse_kl = student_log_probs - teacher_log_probs
    return advantages - coef * reverse_kl, reverse_kl


def _last_trained(mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """[R] bool: the last unmasked token of each sequence."""
    counts = sequence_sums(mask.long(), lengths)
    ordinal = mask.long().cumsum(0)
    before = spread(counts.cumsum(0), lengths)
    return mask & (ordinal == before)
