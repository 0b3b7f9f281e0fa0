"""--buffer-filter-path: which of the groups that wait are trained next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pipeline.planner import oldest_first
from pipeline.stored_samples import GroupReader, stored_samples
from pipeline.user_functions import call_user_function
from storage.queue_types import AcceptedGroup
from vime.errors import RewardError
from vime.utils.types import Sample

FLAG = "--buffer-filter-path"
BufferFilter = Callable[[Any, int, list[list[Sample]], int], Any]
"""`f(args, rollout_id, buffer, num_samples)`, which returns `num_samples` groups of the buffer."""


def take_groups(
    groups: Sequence[AcceptedGroup],
    pool: GroupReader,
    function: BufferFilter,
    args: Any,
    *,
    rollout_id: int,
    count: int,
) -> list[AcceptedGroup]:
    """The `count` groups that the function takes of those that wait; the others stay where they are.

    The buffer has every group that waits, in the order in which vime would take them, without candidates and routes.

    Raises:
        RewardError: the function raised, or returned something else than `count` different groups of the buffer.
        StorageError: a group can't be read.
    """
    waiting = oldest_first(groups)
    buffer = [stored_samples(group.ref, pool) for group in waiting]
    taken = call_user_function(FLAG, function, args, rollout_id, buffer, count)
    by_index = {group.summary.group_index: group for group in waiting}
    indices = _group_indices(taken)
    wrong = sorted({index for index in indices if index not in by_index or indices.count(index) > 1})
    if len(indices) != count or wrong:
        named = f" (group {', '.join(map(str, wrong))} isn't in the buffer, or twice)" if wrong else ""
        raise _refused(f"{len(indices)} groups{named}", count)
    return [by_index[index] for index in indices]


def _group_indices(taken: Any) -> list[int]:
    try:
        return [int(group[0].group_index) for group in taken]
    except (TypeError, IndexError, AttributeError) as error:
        raise RewardError(
            f"{FLAG} returned {type(taken).__name__}, allowed: a list of groups of the buffer.",
            next_step="Correct the function.",
        ) from error


def _refused(found: str, count: int) -> RewardError:
    return RewardError(
        f"{FLAG} returned {found}, allowed: {count} different groups of the buffer.",
        next_step="Return as many groups as it is asked for; the others stay in the queue.",
    )
