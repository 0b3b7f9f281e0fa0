"""Each way in which a reward can be unusable has a reason of its own, and names the sample."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from vime.errors import RewardError
from vime.rollout.rewards import score
from vime.utils.types import Sample


def returning(value: Any) -> Any:
    async def reward(args: Any, sample: Sample) -> Any:  # noqa: ARG001 - the documented hook signature
        return value

    return reward


async def raising(args: Any, sample: Sample) -> float:  # noqa: ARG001 - the documented hook signature
    raise KeyError("no such environment")


async def hanging(args: Any, sample: Sample) -> float:  # noqa: ARG001 - the documented hook signature
    await asyncio.Event().wait()
    return 1.0


CASES = {
    "None": returning(None),
    "NaN": returning(math.nan),
    "infinite": returning(-math.inf),
    "text": returning("0.5"),
    "other key": returning({"format": 1.0}),
    "raises": raising,
    "hangs": hanging,
}


async def reason_of(reward: Any) -> str:
    sample = Sample(group_index=3, index=7)
    key = "math" if reward is CASES["other key"] else None
    with pytest.raises(RewardError, match="sample 7 of group 3") as caught:
        await score(reward, None, sample, timeout_s=0.05, key=key)
    return caught.value.reason


async def test_no_two_kinds_of_bad_reward_share_a_reason() -> None:
    reasons = {name: await reason_of(reward) for name, reward in CASES.items()}
    assert len(set(reasons.values())) == len(CASES), reasons
    assert all(reason.startswith("reward_") for reason in reasons.values())


async def test_true_is_no_number_like_text() -> None:
    assert await reason_of(returning(True)) == await reason_of(CASES["text"])
