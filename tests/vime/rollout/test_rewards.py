"""Rewards by name and by path, of samples and of groups."""

import pytest

from vime.errors import RewardError, SettingsError
from vime.rollout.rewards import load_group_reward, score_group
from vime.utils.types import Sample


def samples() -> list[Sample]:
    return [Sample(group_index=0, index=n, response=text, label="a b") for n, text in enumerate(["a b", "a", "c"])]


async def by_length(args: object, group: list[Sample]) -> list[float]:  # noqa: ARG001
    return [float(len(sample.response)) for sample in group]


async def test_a_built_in_reward_scores_each_sample_of_a_group_by_itself() -> None:
    group = samples()
    await score_group(load_group_reward("f1", None), None, group, timeout_s=5)
    assert [sample.reward for sample in group] == [1.0, pytest.approx(2 / 3), 0.0]


async def test_a_group_reward_of_ones_own_gets_the_whole_group() -> None:
    group = samples()
    await score_group(load_group_reward(None, f"{__name__}.by_length"), None, group, timeout_s=5)
    assert [sample.reward for sample in group] == [3.0, 1.0, 1.0]


async def test_too_few_rewards_leave_every_sample_without_one() -> None:
    async def short(args: object, group: list[Sample]) -> list[float]:  # noqa: ARG001
        return [1.0]

    group = samples()
    with pytest.raises(RewardError, match="group 0: the reward returned 1, allowed: a list of 3") as caught:
        await score_group(short, None, group, timeout_s=5)
    assert caught.value.reason == "reward_count"
    assert [sample.reward for sample in group] == [None] * 3


def test_an_unknown_reward_is_refused_for_groups_too() -> None:
    with pytest.raises(SettingsError, match="--rm-type is 'nothing'"):
        load_group_reward("nothing", None)
