"""Rewards, returns and advantages in plain Python, one sequence and one token at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence


def grouped_rewards(
    rewards: Sequence[float], groups: Sequence[int], rollouts: Sequence[int], *, divide: bool
) -> list[float]:
    """Centred, and divided by the sample standard deviation + 1e-6 where a group has more than one rollout."""
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        of_group = {
            rollout: other
            for other, other_group, rollout in zip(rewards, groups, rollouts, strict=True)
            if other_group == group
        }
        values = list(of_group.values())
        mean = sum(values) / len(values)
        centred = reward - mean
        if divide and len(values) > 1:
            variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
            centred /= math.sqrt(variance) + 1e-6
        result.append(centred)
    return result


def discounted_returns(
    reward: float, kl: Sequence[float], mask: Sequence[int], kl_coef: float, gamma: float
) -> list[float]:
    """Returns of one sequence: the reward at the last unmasked token, a penalty at each unmasked one."""
    token_rewards = [-kl_coef * value if kept else 0.0 for value, kept in zip(kl, mask, strict=True)]
    trained = [position for position, kept in enumerate(mask) if kept]
    if trained:
        token_rewards[trained[-1]] += reward
    returns = [0.0] * len(mask)
    following = 0.0
    for position in reversed(range(len(mask))):
        following = token_rewards[position] + gamma * following
        returns[position] = following
    return returns


def gae(
    reward: float,
    kl: Sequence[float],
    values: Sequence[float],
    mask: Sequence[int],
    coefs: tuple[float, float, float],
) -> tuple[list[float], list[float]]:
    """(advantages, returns) of one sequence; `coefs` are KL coefficient, gamma and lambda."""
    kl_coef, gamma, lambd = coefs
    advantages, returns = [0.0] * len(values), [0.0] * len(values)
    following = 0.0
    for position in reversed(range(len(values))):
        last = position == len(values) - 1
        token_reward = (-kl_coef * kl[position] if mask[position] else 0.0) + (reward if last else 0.0)
        next_value = 0.0 if last else values[position + 1]
        delta = token_reward + gamma * next_value - values[position]
        following = delta + gamma * lambd * following
        advantages[position], returns[position] = following, following + values[position]
    return advantages, returns


def whitened(values: Sequence[float], mask: Sequence[int]) -> list[float]:
    """Mean 0 and Bessel-corrected variance 1 over the unmasked values; 0 where masked."""
    chosen = [value for value, kept in zip(values, mask, strict=True) if kept]
    mean = math.fsum(chosen) / len(chosen)
    variance = math.fsum((value - mean) ** 2 for value in chosen) / max(len(chosen) - 1, 1)
    return [
        (value - mean) / math.sqrt(variance + 1e-8) if kept else 0.0 for value, kept in zip(values, mask, strict=True)
    ]
