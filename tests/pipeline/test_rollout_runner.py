"""Rollout functions over the queue: vime's own called one after another, and the user's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from storage.columns import decode_group
from storage.dead_letters import letters_folder, read_letters
from tests.pipeline import own_rollout_functions
from tests.pipeline.stream_parts import Parts, stream
from tests.support.standin_engine import StandinEngine
from vime.errors import RunFailedError
from vime.rollout.fully_async_rollout import generate_rollout_fully_async
from vime.utils.types import Sample

pytestmark = pytest.mark.usefixtures("quick_retries")

OWN = "tests.pipeline.own_rollout_functions"
FILTERS = "tests.pipeline.filters_for_tests"
SYNC = "vime.rollout.vllm_rollout.generate_rollout"
FULLY_ASYNC = "vime.rollout.fully_async_rollout.generate_rollout_fully_async"


def args_of(path: str, **values: Any) -> SimpleNamespace:
    defaults = {
        "rollout_function_path": path,
        "rollout_batch_size": 2,
        "over_sampling_batch_size": None,
        "rollout_sample_filter_path": None,
        "rollout_all_samples_process_path": None,
        "reward_key": None,
    }
    return SimpleNamespace(**{**defaults, **values})


async def accepted(parts: Parts, count: int) -> list[list[Sample]]:
    await parts.until_pending(count)
    groups = await parts.coordinator.wait_for_groups(count, 1) or []
    stored = [parts.pool.read_group(group.ref) for group in sorted(groups, key=lambda group: group.position)]
    return [decode_group(group.header, group.columns) for group in stored]


@pytest.mark.parametrize("path", [SYNC, FULLY_ASYNC])
@pytest.mark.parametrize("in_memory", [True, False])
async def test_vimes_own_functions_make_rollouts_until_the_run_has_what_it_needs(
    tmp_path: Path, engine: StandinEngine, path: str, in_memory: bool
) -> None:
    async with stream(tmp_path, engine, rollout_args=args_of(path), groups_wanted=6, in_memory=in_memory) as parts:
        groups = await accepted(parts, 6)
        assert {group[0].group_index for group in groups} == set(range(6))
        async with asyncio.timeout(60):
            while parts.producer.stats().groups_published < 6:  # the answer of the queue comes after the fact
                await asyncio.sleep(0.01)
        assert parts.producer.stats().samples_published == 12
        assert parts.coordinator.identity().holds


async def test_rejected_groups_are_replaced_and_functions_on_whole_rollouts_see_them(
    tmp_path: Path, engine: StandinEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(own_rollout_functions, "SEEN", seen)
    args = args_of(
        SYNC,
        over_sampling_batch_size=3,
        rollout_all_samples_process_path=f"{OWN}.see_all",
        rollout_sample_filter_path=f"{OWN}.remove_odd",
    )
    async with stream(
        tmp_path, engine, rollout_args=args, groups_wanted=4, filter_path=f"{FILTERS}.drop_odd_groups"
    ) as parts:
        groups = await accepted(parts, 4)
        assert parts.coordinator.counts().dropped.keys() == {"filter_odd"}
    assert {(group[0].group_index or 0) % 2 for group in groups} == {0}
    assert [[sample.mask_array().any() for sample in group] for group in groups] == [[True, False]] * 4
    assert any((index or 0) % 2 for indices, _ in seen for index in indices)
    assert {size for _, size in seen} == {40}


async def test_a_function_of_the_users_own_gets_groups_and_gives_some_back(
    tmp_path: Path, engine: StandinEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(own_rollout_functions, "CALLS", calls)
    async with stream(tmp_path, engine, rollout_args=args_of(f"{OWN}.by_hand"), groups_wanted=6) as parts:
        groups = await accepted(parts, 4)
    assert [group[0].group_index for group in groups] == [0, 1, 2, 3], "what was given back comes first"
    assert [sample.rollout_id for sample in groups[0]] == [0, 0]
    assert calls[:2] == [3, 4]


async def test_a_function_may_wrap_vimes_own(tmp_path: Path, engine: StandinEngine) -> None:
    async with stream(tmp_path, engine, rollout_args=args_of(f"{OWN}.doubling"), groups_wanted=2) as parts:
        assert [[sample.reward for sample in group] for group in await accepted(parts, 2)] == [[2.0, 2.0]] * 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raising", "rollout 3: it raised KeyError: 'no such environment'"),
        ("wrong", "rollout 3: it returned a value of type int, allowed: lists of samples"),
        ("two_ids", "rollout 3: it returned segments of one rollout with the ids 0, 77, allowed: one for all"),
    ],
)
async def test_a_function_that_fails_ends_the_run_with_its_error(
    tmp_path: Path, engine: StandinEngine, name: str, message: str
) -> None:
    async with stream(tmp_path, engine, rollout_args=args_of(f"{OWN}.{name}")) as parts:
        with pytest.raises(RunFailedError, match=message):
            await asyncio.wait_for(asyncio.shield(parts.running), 20)


async def test_a_stop_cuts_a_rollout_short_and_gives_unfinished_groups_back(
    tmp_path: Path, engine: StandinEngine
) -> None:
    engine.faults.step_s = 0.02
    async with stream(tmp_path, engine, rollout_args=args_of(SYNC), response_tokens=500) as parts:
        while (await parts.client.metrics()).num_running < 4:
            await asyncio.sleep(0.01)
        parts.producer.stop()
        await asyncio.wait_for(parts.running, 10)
        identity = parts.coordinator.identity()
        assert identity.holds
        assert (identity.pending, identity.in_flight) == (0, 2)
        assert len(parts.queue.released) == 2


async def failing_in_group_0(args: Any, sample: Sample) -> Any:  # noqa: ARG001
    return None if sample.group_index == 0 else 1.0


async def test_a_group_that_fails_too_often_is_set_aside_under_its_reason(
    tmp_path: Path, engine: StandinEngine
) -> None:
    async with stream(
        tmp_path, engine, rollout_args=args_of(SYNC), reward=failing_in_group_0, groups_wanted=2
    ) as parts:
        await accepted(parts, 2)
        assert parts.coordinator.counts().dropped == {"reward_none": 1}
        assert parts.producer.stats().failed_samples == {"reward_none": 4}
    letters, _ = read_letters(letters_folder(tmp_path))
    assert {(letter.group_index, letter.reason, letter.attempt) for letter in letters} == {(0, "reward_none", 1)}
    assert sorted(letter.sample_indices[0] for letter in letters) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("function", "filter_name", "reason"),
    [(SYNC, "fail_on_the_first", "failing_filter"), (f"{OWN}.cutting", None, "response_length")],
)
async def test_a_finished_group_that_a_filter_or_the_queue_refuses_leaves_a_letter(
    tmp_path: Path, engine: StandinEngine, function: str, filter_name: str | None, reason: str
) -> None:
    path = None if filter_name is None else f"{FILTERS}.{filter_name}"
    async with stream(tmp_path, engine, rollout_args=args_of(function), groups_wanted=2, filter_path=path) as parts:
        await accepted(parts, 2)
        assert parts.coordinator.counts().dropped == {reason: 1}
    ((letter,), _) = read_letters(letters_folder(tmp_path))
    assert (letter.group_index, letter.reason, letter.sample_indices) == (0, reason, [0, 1])


def test_the_fully_asynchronous_function_makes_no_evaluation() -> None:
    with pytest.raises(ValueError, match="makes no evaluation"):
        generate_rollout_fully_async(None, 0, None, evaluation=True)
