"""What a dry run tries out: the prompt file is read and the reward is called. No process is started."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from dataclasses import dataclass

from vime.data.cursor import PromptCursor, PromptTask
from vime.data.prompt_stream import PromptStream
from vime.errors import NoRouterError, RewardError
from vime.rollout.rewards import REMOTE, Rewards, reward_value, score, score_group
from vime.settings.groups import Settings
from vime.settings.parse import HookArgs
from vime.settings.rules.quantities import is_stream, own_engines
from vime.utils.types import Sample

NUM_TRIALS = 2
TRIAL_S = 5.0
"""How long a start waits for the reward on the first records."""
_PASSING = ("reward_timeout", "reward_process_died", "reward_memory")
"""Failures that say little about the next call."""


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
    trials = [(source.where(task.row), _labelled_sample(task)) for task in first_prompts(source, num_trials)]
    results = []
    for result in asyncio.run(_try_all(settings, trials)):
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return results


def reward_failure(settings: Settings, source: PromptStream) -> RewardError | None:
    """What speaks against the reward: it fails on each of the first records, with their labels as responses.

    None where this says nothing about the run: a remote judge, which may come up later; a reward of the user's own that
    asks an engine of the run, none of which is there yet; samples that the user's own function makes, or that a user's
    own source hands out; records without a label; a reward that takes too long.
    """
    rollout = settings.rollout
    is_own = rollout.custom_generate_function_path is not None or not is_stream(settings)
    is_scored = rollout.custom_rm_path is not None or rollout.rm_type is not None
    is_remote = rollout.custom_rm_path is None and rollout.rm_type == REMOTE
    may_ask_engines = rollout.custom_rm_path is not None and len({spec.model for spec in own_engines(settings)}) > 1
    if is_own or not is_scored or is_remote or may_ask_engines or settings.data.data_source_path is not None:
        return None
    tasks = first_prompts(source, NUM_TRIALS)
    if not tasks or any(task.label is None for task in tasks):
        return None
    trials = [(source.where(task.row), _labelled_sample(task)) for task in tasks]
    failures = [error for error in asyncio.run(_try_briefly(settings, trials)) if isinstance(error, RewardError)]
    telling = [error for error in failures if error.reason not in _PASSING and not _asked_for_an_engine(error)]
    return telling[0] if len(telling) == len(trials) else None


def _asked_for_an_engine(error: BaseException | None) -> bool:
    """Whether `get_model_url` is behind an error."""
    while error is not None and not isinstance(error, NoRouterError):
        error = error.__cause__
    return error is not None


async def _try_briefly(settings: Settings, trials: list[tuple[str, Sample]]) -> list[RewardTrial | BaseException]:
    """As `_try_all`; nothing when `TRIAL_S` were not enough."""
    try:
        return await asyncio.wait_for(_try_all(settings, trials), TRIAL_S)
    except TimeoutError:
        return []


async def _try_all(settings: Settings, trials: list[tuple[str, Sample]]) -> list[RewardTrial | BaseException]:
    """What each trial gave or raised. Raises `SettingsError` as `Rewards` does.

    One process grades: others would still be starting when it has, and complain of being ended.
    """
    alone = dataclasses.replace(settings, rollout=dataclasses.replace(settings.rollout, reward_workers=1))
    async with Rewards(alone) as rewards:
        tried = (_try(rewards, settings, where, sample) for where, sample in trials)
        return await asyncio.gather(*tried, return_exceptions=True)


async def _try(rewards: Rewards, settings: Settings, where: str, sample: Sample) -> RewardTrial:
    """Score as the producer does it; a reward of whole groups gets equal samples. Raises `RewardError`."""
    rollout, args = settings.rollout, HookArgs(settings)
    try:
        if rollout.group_rm:
            group = [sample, *(copy.deepcopy(sample) for _ in range(1, settings.data.n_samples_per_prompt))]
            for number, other in enumerate(group[1:], start=1):
                other.index = None if sample.index is None else sample.index + number
            await score_group(rewards.of_group, args, group, timeout_s=rollout.reward_timeout)
        else:
            await score(rewards.of_sample, args, sample, timeout_s=rollout.reward_timeout, key=rollout.reward_key)
        return RewardTrial(where, sample.response, reward_value(sample, rollout.reward_key))
    except RewardError as error:
        raise RewardError(
            f"{where}, with its label as the response: {error.message}",
            next_step=error.next_step or "Correct the reward or the record; every such sample would be set aside.",
            reason=error.reason,
        ) from error


def _labelled_sample(task: PromptTask) -> Sample:
    """With a token for each word, which stands for nothing."""
    response = "" if task.label is None else str(task.label)
    num_tokens = max(1, len(response.split()))
    return Sample(
        group_index=task.group_index,
        index=task.first_sample_index,
        prompt=task.prompt,
        response=response,
        tokens=[0] * num_tokens,
        response_length=num_tokens,
        label=task.label,
        metadata=copy.deepcopy(task.metadata),
        status=Sample.Status.COMPLETED,
    )
