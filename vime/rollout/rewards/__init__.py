"""Rewards: built-in ones by name, the user's by dotted path; every call has a deadline, every result is checked."""

from vime.rollout.rewards.graders import REMOTE
from vime.rollout.rewards.of_run import Rewards
from vime.rollout.rewards.scoring import (
    GroupRewardFunction,
    RewardFunction,
    TimedReward,
    reward_value,
    score,
    score_group,
)

__all__ = [
    "REMOTE",
    "GroupRewardFunction",
    "RewardFunction",
    "Rewards",
    "TimedReward",
    "reward_value",
    "score",
    "score_group",
]
