"""Which reward a sample gets, of samples and of groups."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from vime.errors import RewardError, SettingsError
from vime.rollout.rewards import Rewards, score, score_group
from vime.settings.parse import parse_settings
from vime.utils.types import Sample

gate = threading.Event()


def samples() -> list[Sample]:
    return [Sample(group_index=0, index=n, response=text, label="a b") for n, text in enumerate(["a b", "a", "c"])]


async def by_length(args: object, group: list[Sample]) -> list[float]:  # noqa: ARG001
    return [float(len(sample.response)) for sample in group]


async def three(args: object, sample: Sample) -> float:  # noqa: ARG001
    return 3.0


async def blocking(args: object, sample: Sample) -> float:  # noqa: ARG001
    """Waits without giving its event loop back."""
    gate.wait(30)
    return 1.0


def of_run(*words: str) -> Rewards:
    return Rewards(parse_settings([*words, "--reward-workers", "1"]))


async def reward_of(rewards: Rewards, sample: Sample) -> Any:
    await score(rewards.of_sample, None, sample, timeout_s=0, key=None)
    return sample.reward


@pytest.mark.multiproc
async def test_a_built_in_reward_scores_each_sample_of_a_group_by_itself() -> None:
    group = samples()
    async with of_run("--rm-type", "f1", "--group-rm") as rewards:
        await score_group(rewards.of_group, None, group, timeout_s=0)
    assert [sample.reward for sample in group] == [1.0, pytest.approx(2 / 3), 0.0]


async def test_a_group_reward_of_ones_own_gets_the_whole_group() -> None:
    group = samples()
    async with of_run("--custom-rm-path", f"{__name__}.by_length", "--group-rm") as rewards:
        await score_group(rewards.of_group, None, group, timeout_s=0)
    assert [sample.reward for sample in group] == [3.0, 1.0, 1.0]


async def test_too_few_rewards_leave_every_sample_without_one() -> None:
    async def short(args: object, group: list[Sample]) -> list[float]:  # noqa: ARG001
        return [1.0]

    group = samples()
    with pytest.raises(RewardError, match="group 0: the reward returned 1, allowed: a list of 3") as caught:
        await score_group(short, None, group, timeout_s=5)
    assert caught.value.reason == "reward_count"
    assert [sample.reward for sample in group] == [None] * 3


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--rm-type", "nothing"], "--rm-type is 'nothing', allowed: .*math.* each also as boxed_NAME"),
        (["--custom-rm-path", "no.such.module"], "--custom-rm-path no.such.module: No module named"),
        (["--custom-rm-path", f"{__name__}.absent"], "has no function 'absent'"),
    ],
)
def test_a_reward_that_cannot_be_found_is_refused_at_the_start(words: list[str], match: str) -> None:
    with pytest.raises(SettingsError, match=match):
        of_run(*words)


@pytest.mark.multiproc
async def test_the_most_particular_choice_of_a_reward_wins() -> None:
    path, by_record = f"{__name__}.three", {"rm_type": "f1"}
    async with of_run("--rm-type", "random") as rewards:
        assert await reward_of(rewards, Sample(response="x", label="y")) in (0.0, 1.0)
        assert await reward_of(rewards, Sample(response="a", label="a b", metadata=by_record)) == pytest.approx(2 / 3)
        assert await reward_of(rewards, Sample(response="a", metadata=by_record, custom_rm_path=path)) == 3.0
    async with of_run("--custom-rm-path", path) as rewards:
        assert await reward_of(rewards, Sample(response="a", label="a b", metadata=by_record)) == 3.0


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("sample", "match"),
    [
        (Sample(metadata={"rm_type": "nothing"}), "metadata\\[\"rm_type\"\\] is 'nothing'"),
        (Sample(metadata={"rm_type": ["f1"]}), "is \\['f1'\\]"),
        (Sample(metadata={"rm_type": "remote_rm"}), "without --rm-url"),
        (Sample(custom_rm_path="no.such.module"), "No module named"),
    ],
    ids=["unknown", "no name", "no address", "no module"],
)
async def test_a_record_that_names_no_reward_fails_alone_with_its_reason(sample: Sample, match: str) -> None:
    async with of_run("--rm-type", "f1") as rewards:
        with pytest.raises(RewardError, match=match) as caught:
            await reward_of(rewards, sample)
        assert caught.value.reason == "reward_unknown_type"
        assert await reward_of(rewards, Sample(response="a", label="a")) == 1.0


async def test_a_coroutine_that_blocks_holds_up_neither_its_caller_nor_later_rewards() -> None:
    gate.clear()
    async with of_run("--custom-rm-path", f"{__name__}.blocking", "--reward-timeout", "0.2") as rewards:
        started = time.monotonic()
        stuck = asyncio.create_task(reward_of(rewards, Sample()))
        await asyncio.sleep(0)
        assert time.monotonic() - started < 0.2
        with pytest.raises(RewardError, match=r"longer than 0\.2 s"):
            await stuck
        assert await reward_of(rewards, Sample(custom_rm_path=f"{__name__}.three")) == 3.0
    gate.set()
