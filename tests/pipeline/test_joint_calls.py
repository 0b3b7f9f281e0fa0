"""Calls that wait together are worked on together, and each gets its own answer or error."""

import asyncio
from collections.abc import Sequence

import pytest

from pipeline.joint_calls import JointCalls
from vime.errors import StorageError


class Work:
    """Doubles numbers, refuses 13, and can't count beyond 99."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(self, items: Sequence[int]) -> list[int]:
        self.calls.append(list(items))
        if 13 in items:
            raise StorageError("13 is refused.")
        if max(items) > 99:
            raise OverflowError("100")
        return [2 * item for item in items]


async def test_calls_that_wait_together_are_one_and_get_their_own_answers() -> None:
    work = Work()
    joint = JointCalls(work)
    assert await asyncio.gather(joint.call([1, 2]), joint.call([]), joint.call([3])) == [[2, 4], [], [6]]
    assert work.calls == [[1, 2, 3]]


async def test_a_later_call_is_one_of_its_own() -> None:
    work = Work()
    joint = JointCalls(work)
    assert await joint.call([1]) == [2]
    assert await joint.call([2]) == [4]
    assert work.calls == [[1], [2]]


async def test_a_refused_call_spoils_none_of_the_others() -> None:
    joint = JointCalls(Work())
    first, refused, last = await asyncio.gather(
        joint.call([1]), joint.call([13]), joint.call([2]), return_exceptions=True
    )
    assert (first, last) == ([2], [4])
    assert isinstance(refused, StorageError)


async def test_a_refused_call_alone_is_tried_once() -> None:
    work = Work()
    with pytest.raises(StorageError, match="13 is refused"):
        await JointCalls(work).call([13])
    assert work.calls == [[13]]


async def test_an_error_of_the_program_reaches_every_call() -> None:
    joint = JointCalls(Work())
    outcomes = await asyncio.gather(joint.call([1]), joint.call([100]), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [OverflowError, OverflowError]


async def test_a_caller_that_gives_up_leaves_the_others_their_answers() -> None:
    joint = JointCalls(Work())
    first, second = asyncio.create_task(joint.call([1])), asyncio.create_task(joint.call([2]))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == [4]
