"""One call of a reward for a sample or a group: its deadline, and the check of what it returned."""

from __future__ import annotations

import asyncio
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from vime.errors import RewardError
from vime.utils.types import Sample

RewardFunction = Callable[[Any, Sample], Awaitable[Any]]
GroupRewardFunction = Callable[[Any, list[Sample]], Awaitable[Any]]
"""Rewards of all samples of a group, in their order."""


class TimedReward(ABC):
    """A reward that bounds each call by itself, because a call may have to wait for its turn before it begins."""

    @abstractmethod
    async def __call__(self, args: Any, scored: Any) -> Any:
        """Reward of a sample, or rewards of a group. Raises `RewardError` with the reason of a failure."""


async def score(reward: RewardFunction, args: Any, sample: Sample, *, timeout_s: float, key: str | None) -> None:
    """Set `sample.reward`; numbers of other libraries (NumPy's, for example) become plain ones.

    A `TimedReward` has a deadline of its own instead of `timeout_s`.

    Raises:
        RewardError: the function raised, took longer than `timeout_s`, or returned something that is not a finite
            number (or, with `key`, a dict that holds one under it). Its `reason` says which of these.
    """
    value = await answer_in_time(_called(reward, args, sample), place_of(sample), _limit(reward, timeout_s))
    sample.reward = plain_reward(value)
    reward_value(sample, key)


async def score_group(reward: GroupRewardFunction, args: Any, samples: list[Sample], *, timeout_s: float) -> None:
    """Set the reward of each sample by one call for all; what each got is not judged here (see `reward_value`).

    Raises:
        RewardError: the function raised, took longer than `timeout_s`, or returned something else than a list with
            one reward for each sample. Its `reason` says which of these.
    """
    where = f"group {samples[0].group_index}"
    values = await answer_in_time(_called(reward, args, samples), where, _limit(reward, timeout_s))
    if not isinstance(values, list | tuple) or len(values) != len(samples):
        found = f"{len(values)}" if isinstance(values, list | tuple) else f"a value of type {type(values).__name__}"
        raise RewardError(
            f"{where}: the reward returned {found}, allowed: a list of {len(samples)}, one for each sample.",
            reason="reward_count",
        )
    for sample, value in zip(samples, values, strict=True):
        sample.reward = plain_reward(value)


async def answer_in_time(call: Coroutine[Any, Any, Any], where: str, timeout_s: float | None) -> Any:
    """What a reward returned. Raises `RewardError`, which names `where`, when it raised, or took too long."""
    running = asyncio.create_task(call)
    try:
        done, _ = await asyncio.wait([running], timeout=timeout_s)
    finally:
        running.cancel()  # not awaited: a reward that ignores its cancellation must not hold the sample
    if not done:
        raise RewardError(f"{where}: the reward took longer than {timeout_s:g} s.", reason="reward_timeout")
    try:
        return running.result()
    except asyncio.CancelledError as error:
        # Raised by the reward itself; going up, it would end the sample without a reward and without an error.
        raise RewardError(
            f"{where}: something that the reward awaited was cancelled.", reason="reward_raised"
        ) from error
    except RewardError as error:
        message = error.message if where in error.message else f"{where}: {error.message}"
        raise RewardError(message, next_step=error.next_step, reason=error.reason) from error
    except Exception as error:  # the boundary to user code: whatever it raises becomes the sample's reason
        raise RewardError(
            f"{where}: the reward raised {type(error).__name__}: {error}.", reason="reward_raised"
        ) from error


def _limit(reward: object, timeout_s: float) -> float | None:
    return None if isinstance(reward, TimedReward) else timeout_s


async def _called(reward: Callable[[Any, Any], Awaitable[Any]], args: Any, scored: Any) -> Any:
    """The reward as a coroutine, whatever kind of awaitable it returns."""
    return await reward(args, scored)


def reward_value(sample: Sample, key: str | None) -> float:
    """The number to train on.

    Raises:
        RewardError: it is missing, not a number, or not finite; `reason` says which.
    """
    value: Any = sample.reward
    if isinstance(value, dict):
        if key is None or key not in value:
            raise RewardError(
                f"{place_of(sample)}: the reward is a dict with keys {sorted(value)}, --reward-key is {key!r}.",
                next_step="Name one of the keys with --reward-key.",
                reason="reward_key_missing",
            )
        value = value[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RewardError(
            f"{place_of(sample)}: the reward is {value!r}, allowed: a finite number.", reason=_what_is_wrong(value)
        )
    return float(value)


def _what_is_wrong(value: object) -> str:
    if value is None:
        return "reward_none"
    if isinstance(value, float):
        return "reward_nan" if math.isnan(value) else "reward_infinite"
    return "reward_not_a_number"


def place_of(sample: Sample) -> str:
    """A sample as messages name it."""
    return f"sample {sample.index} of group {sample.group_index}"


def plain_reward(value: Any) -> Any:
    """A number, or a dict of numbers, as plain Python ones."""
    return {name: _plain(item) for name, item in value.items()} if isinstance(value, dict) else _plain(value)


def _plain(value: Any) -> Any:
    """A number of any library as a float; anything else as it is."""
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else value
