"""What a dry run tries out: the prompt file is read and the reward is called. No process is started."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass

from vime.data.cursor import PromptCursor, PromptTask
from vime.data.prompt_stream import PromptStream
from vime.errors import RewardError
from vime.rollout.rewards import Rewards, reward_value, score, score_group
from vime.settings.groups import Settings
from vime.settings.parse import HookArgs
from vime.utils.types import Sample

NUM_TRIALS = 2


@dataclass(frozen=True)
class PromptFacts:
    """What was found in the prompt file."""

    num_prompts: int
    num_bad_records: int
    """Skipped, with --bad-prompt-records skip."""
    rollouts_per_epoch: float
    epochs: float


@dataclass(frozen=True)
class RewardTrial:
    """One call of the reward function, with the record's label as the response."""

    where: str
    response: str
    reward: float


def prompt_facts(settings: Settings, source: PromptStream) -> PromptFacts:
    per_epoch = len(source) / (settings.data.rollout_batch_size or 1)
    return PromptFacts(len(source), len(source.bad_records), per_epoch, (settings.data.num_rollout or 0) / per_epoch)


def first_prompts(source: PromptStream, count: int) -> list[PromptTask]:
    """The first prompts of the first epoch, at most as many as there are."""
    return source.take(PromptCursor(), min(count, len(source)))[0]


def try_reward(settings: Settings, source: PromptStream, num_trials: int = NUM_TRIALS) -> list[RewardTrial]:
    """Call the reward on the first prompts, each with its label as the response.

    Raises:
        SettingsError: the reward can't be found.
        RewardError: it fails on a record; the message names the record.
    """
    trials = []
    for task in first_prompts(source, num_trials):
        sample = _labelled_sample(task)
        where = source.where(task.row)
        try:
            asyncio.run(_score(settings, sample))
            trials.append(RewardTrial(where, sample.response, reward_value(sample, settings.rollout.reward_key)))
        except RewardError as error:
            raise RewardError(
                f"{where}, with its label as the response: {error.message}",
                next_step=error.next_step or "Correct the reward or the record; every such sample would be set aside.",
            ) from error
    return trials


async def _score(settings: Settings, sample: Sample) -> None:
    """As the producer does it; a reward of whole groups gets a group of one."""
    rollout, args = settings.rollout, HookArgs(settings)
    async with Rewards(settings) as rewards:
        if rollout.group_rm:
            await score_group(rewards.of_group, args, [sample], timeout_s=rollout.reward_timeout)
        else:
            await score(rewards.of_sample, args, sample, timeout_s=rollout.reward_timeout, key=rollout.reward_key)


def _labelled_sample(task: PromptTask) -> Sample:
    return Sample(
        group_index=task.group_index,
        index=task.first_sample_index,
        prompt=task.prompt,
        response="" if task.label is None else str(task.label),
        label=task.label,
        metadata=copy.deepcopy(task.metadata),
        status=Sample.Status.COMPLETED,
    )
