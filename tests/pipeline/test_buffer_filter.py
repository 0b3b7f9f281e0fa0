"""--buffer-filter-path: the function chooses, and what it doesn't take stays."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.buffer_filter import take_groups
from storage.memory_pool import MemoryPool
from storage.queue_types import AcceptedGroup
from tests.pipeline.test_reward_post_process import stored
from vime.errors import RewardError
from vime.utils.types import Sample

__all__ = ["stored"]

Stored = tuple[list[AcceptedGroup], MemoryPool]


def take(stored: Stored, function: Any, count: int = 2) -> list[int]:
    groups, pool = stored
    taken = take_groups([groups[2], *groups[:2]], pool, function, "args", rollout_id=5, count=count)
    return [group.position for group in taken]


def test_the_function_sees_all_that_waits_in_the_queues_order_and_takes_what_it_wants(stored: Stored) -> None:
    seen: list[Any] = []

    def newest(args: Any, rollout_id: int, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
        seen.append((args, rollout_id, [group[0].metadata["level"] for group in buffer], num_samples))
        return [buffer.pop() for _ in range(num_samples)]

    assert take(stored, newest) == [12, 11]
    assert seen == [("args", 5, [0, 1, 2], 2)]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda _args, _id, buffer, _n: buffer[:1], "returned 1 groups, allowed: 2 different groups"),
        (lambda _args, _id, buffer, _n: buffer, "returned 3 groups, allowed: 2"),
        (lambda _args, _id, buffer, _n: [buffer[1], buffer[1]], r"returned 2 groups \(group 1 isn't in the buffer, or"),
        (lambda *_: [[Sample(group_index=9)], [Sample(group_index=0)]], r".*\(group 9 isn't in the buffer"),
        (lambda *_: None, "returned NoneType, allowed: a list of groups"),
        (lambda *_: {}["key"], "raised KeyError: 'key'"),
    ],
)
def test_anything_else_than_so_many_groups_of_the_buffer_is_refused(stored: Stored, function: Any, said: str) -> None:
    with pytest.raises(RewardError, match=f"--buffer-filter-path {said}"):
        take(stored, function)
