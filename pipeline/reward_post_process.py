"""--custom-reward-post-process-path: a function of the user's own makes the rewards that a batch trains on."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pipeline.planner import ProcessedRewards
from pipeline.stored_samples import GroupReader, stored_samples
from pipeline.user_functions import call_user_function
from storage.queue_types import AcceptedGroup
from vime.errors import RewardError
from vime.utils.types import Sample

FLAG = "--custom-reward-post-process-path"
PostProcess = Callable[[Any, list[Sample]], Any]
"""`f(args, samples)` -> (raw rewards, rewards), one of each for every sample."""


def process_rewards(
    groups: Sequence[AcceptedGroup], pool: GroupReader, function: PostProcess, args: Any
) -> ProcessedRewards:
    """Call the function once with all samples of a batch, group after group, without candidates and routes.

    Raises:
        RewardError: it raised, or returned something else than two lists with a finite number for each sample.
        StorageError: a group can't be read.
    """
    batch = [stored_samples(group.ref, pool) for group in groups]
    samples = [sample for members in batch for sample in members]
    answer = call_user_function(FLAG, function, args, samples)
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise _refused(f"{type(answer).__name__}", "(raw_rewards, rewards)")
    raw, rewards = (_numbers(name, values, samples) for name, values in zip(_NAMES, answer, strict=True))
    sizes = [len(members) for members in batch]
    return ProcessedRewards(list(_shared_out(raw, sizes)), list(_shared_out(rewards, sizes)))


_NAMES = ("raw_rewards", "rewards")


def _numbers(name: str, values: Any, samples: Sequence[Sample]) -> list[float]:
    try:
        found = [float(value) if isinstance(value, numbers.Real) else math.nan for value in values]
    except TypeError as error:
        raise _refused(f"{name} of type {type(values).__name__}", "lists of numbers") from error
    if len(found) != len(samples):
        raise _refused(f"{len(found)} {name}", f"one for each of {len(samples)} samples")
    for value, sample in zip(found, samples, strict=True):
        if not math.isfinite(value):
            raise _refused(f"no finite number in {name} for sample {sample.index}", "finite numbers")
    return found


def _shared_out(values: Sequence[float], sizes: Sequence[int]) -> Iterator[list[float]]:
    start = 0
    for size in sizes:
        yield list(values[start : start + size])
        start += size


def _refused(found: str, allowed: str) -> RewardError:
    return RewardError(f"{FLAG} returned {found}, allowed: {allowed}.", next_step="Correct the function.")
