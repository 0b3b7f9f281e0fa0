"""Rewards: built-in ones by name, the user's by dotted path; every result is checked."""

from __future__ import annotations

import asyncio
import collections
import importlib
import inspect
import math
import numbers
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from vime.errors import RewardError, SettingsError
from vime.utils.types import Sample

RewardFunction = Callable[[Any, Sample], Awaitable[Any]]
GroupRewardFunction = Callable[[Any, list[Sample]], Awaitable[Any]]
"""Rewards of all samples of a group, in their order."""


async def random_reward(args: Any, sample: Sample) -> float:  # noqa: ARG001 - the documented hook signature
    """0 or 1 by chance; for smoke tests of a pipeline."""
    return float(random.randint(0, 1))


async def f1_reward(args: Any, sample: Sample) -> float:  # noqa: ARG001 - the documented hook signature
    """F1 overlap of whitespace-separated words between response and label."""
    found, wanted = sample.response.split(), str(sample.label).split()
    common = sum((collections.Counter(found) & collections.Counter(wanted)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(found), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


BUILT_IN: dict[str, RewardFunction] = {"random": random_reward, "f1": f1_reward}


def load_reward(rm_type: str | None, custom_rm_path: str | None) -> RewardFunction:
    """The reward that the settings name; a custom path wins.

    Raises:
        SettingsError: unknown name, or a path that can't be imported or is not an async function.
    """
    if custom_rm_path is not None:
        return load_async_function("--custom-rm-path", custom_rm_path)
    if rm_type not in BUILT_IN:
        raise SettingsError(
            f"--rm-type is {rm_type!r}, allowed: {', '.join(sorted(BUILT_IN))}.",
            next_step="Choose one of these or give --custom-rm-path.",
        )
    return BUILT_IN[rm_type]


def load_group_reward(rm_type: str | None, custom_rm_path: str | None) -> GroupRewardFunction:
    """As `load_reward`, for a reward that is called with all samples of a group; built-in ones score each by itself."""
    reward: Any = load_reward(rm_type, custom_rm_path)
    if custom_rm_path is not None:
        own: GroupRewardFunction = reward
        return own

    async def each_by_itself(args: Any, samples: list[Sample]) -> list[Any]:
        return [await reward(args, sample) for sample in samples]

    return each_by_itself


def load_async_function(flag: str, path: str) -> RewardFunction:
    """Import `package.module.function` and check that it is an async function."""
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise SettingsError(f"{flag} is {path!r}, allowed: package.module.function.", next_step="Give the full path.")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise SettingsError(
            f"{flag} {path}: {error}.", next_step="Start vime where the module can be imported, or set PYTHONPATH."
        ) from error
    function = vars(module).get(name)
    if not inspect.iscoroutinefunction(function):
        raise SettingsError(
            f"{flag} {path}: {module_name} has no async function {name!r}.",
            next_step="Define it as `async def`.",
        )
    loaded: RewardFunction = function
    return loaded


async def score(reward: RewardFunction, args: Any, sample: Sample, *, timeout_s: float, key: str | None) -> None:
    """Set `sample.reward`; numbers of other libraries (NumPy's, for example) become plain ones.

    Raises:
        RewardError: the function raised, took longer than `timeout_s`, or returned something that is not a finite
            number (or, with `key`, a dict that holds one under it). Its `reason` says which of these.
    """
    value = await _answer(_called(reward, args, sample), _where(sample), timeout_s)
    sample.reward = _plain_reward(value)
    reward_value(sample, key)


async def score_group(reward: GroupRewardFunction, args: Any, samples: list[Sample], *, timeout_s: float) -> None:
    """Set the reward of each sample by one call for all; what each got is not judged here (see `reward_value`).

    Raises:
        RewardError: the function raised, took longer than `timeout_s`, or returned something else than a list with
            one reward for each sample. Its `reason` says which of these.
    """
    where = f"group {samples[0].group_index}"
    values = await _answer(_called(reward, args, samples), where, timeout_s)
    if not isinstance(values, list | tuple) or len(values) != len(samples):
        found = f"{len(values)}" if isinstance(values, list | tuple) else f"a value of type {type(values).__name__}"
        raise RewardError(
            f"{where}: the reward returned {found}, allowed: a list of {len(samples)}, one for each sample.",
            reason="reward_count",
        )
    for sample, value in zip(samples, values, strict=True):
        sample.reward = _plain_reward(value)


async def _answer(call: Coroutine[Any, Any, Any], where: str, timeout_s: float) -> Any:
    """What a reward returned. Raises `RewardError` when it raised, or took too long."""
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
    except Exception as error:  # the boundary to user code: whatever it raises becomes the sample's reason
        raise RewardError(
            f"{where}: the reward raised {type(error).__name__}: {error}.", reason="reward_raised"
        ) from error


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
                f"{_where(sample)}: the reward is a dict with keys {sorted(value)}, --reward-key is {key!r}.",
                next_step="Name one of the keys with --reward-key.",
                reason="reward_key_missing",
            )
        value = value[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RewardError(
            f"{_where(sample)}: the reward is {value!r}, allowed: a finite number.", reason=_what_is_wrong(value)
        )
    return float(value)


def _what_is_wrong(value: object) -> str:
    if value is None:
        return "reward_none"
    if isinstance(value, float):
        return "reward_nan" if math.isnan(value) else "reward_infinite"
    return "reward_not_a_number"


def _where(sample: Sample) -> str:
    return f"sample {sample.index} of group {sample.group_index}"


def _plain_reward(value: Any) -> Any:
    """A number, or a dict of numbers, as plain Python ones."""
    return {name: _plain(item) for name, item in value.items()} if isinstance(value, dict) else _plain(value)


def _plain(value: Any) -> Any:
    """A number of any library as a float; anything else as it is."""
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else value
