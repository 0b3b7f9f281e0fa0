"""Generate functions and sample hooks of the user's own in the stream."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from storage.columns import decode_group
from tests.pipeline import own_generate_functions
from tests.pipeline.own_generate_functions import TOOL_TOKENS
from tests.pipeline.stream_parts import CharTokenizer, Parts, stream
from tests.support.standin_engine import StandinEngine
from vime.backends.vllm_utils.protocol import SampleColumns
from vime.utils.types import Sample

pytestmark = pytest.mark.usefixtures("quick_retries")

FUNCTIONS = "tests.pipeline.own_generate_functions"
COLUMNS = SampleColumns(num_candidates=3, routes=True, nucleus=True)


def own(name: str) -> dict[str, Any]:
    return {"generate_function_path": f"{FUNCTIONS}.{name}"}


async def accepted(parts: Parts, count: int) -> list[list[Sample]]:
    await parts.until_pending(count)
    groups = await parts.coordinator.wait_for_groups(count, 1) or []
    stored = [parts.pool.read_group(group.ref) for group in groups]
    return [decode_group(group.header, group.columns) for group in stored]


def check_two_turns(sample: Sample) -> None:
    """Five tokens of the model's, three of the tool's, five of the model's: as they were said."""
    assert sample.response_length == 13
    assert sample.tokens[sample.prompt_length + 5 : sample.prompt_length + 8] == TOOL_TOKENS
    assert sample.loss_mask == [1] * 5 + [0] * 3 + [1] * 5
    assert (sample.rollout_log_probs or [])[5:8] == [0.0] * 3
    assert len(sample.rollout_routed_experts) == len(sample.tokens) - 1  # type: ignore[arg-type]
    assert len(sample.rollout_topk_token_ids) == 13  # type: ignore[arg-type]
    offsets = sample.rollout_top_p_token_offsets
    assert offsets is not None
    assert len(offsets) == 14
    assert offsets[5] == offsets[8]


async def test_turns_of_a_tool_lie_between_the_models_own_tokens_and_are_not_trained(
    tmp_path: Path, engine: StandinEngine
) -> None:
    async with stream(
        tmp_path, engine, groups_wanted=2, columns=COLUMNS, response_tokens=40, **own("two_turns")
    ) as parts:
        samples = [sample for group in await accepted(parts, 2) for sample in group]
        assert parts.producer.stats().drifted_tokens == 0
    for sample in samples:
        check_two_turns(sample)
        assert sample.version_spans == [(1, 0, 5), (1, 8, 13)]


async def test_three_turns_keep_the_sampled_tokens_where_the_tokenizer_would_choose_others(
    tmp_path: Path, engine: StandinEngine
) -> None:
    async with stream(tmp_path, engine, groups_wanted=2, response_tokens=60, **own("three_turns")) as parts:
        samples = [sample for group in await accepted(parts, 2) for sample in group]
        assert parts.producer.stats().drifted_tokens == 0
    tokenizer = CharTokenizer()
    for sample in samples:
        response, sampled = sample.tokens[sample.prompt_length :], sample.metadata["sampled"]
        assert [token for token, own in zip(response, sample.loss_mask or [], strict=True) if own] == sampled
        assert len(sampled) == 15
        text = tokenizer.decode(sampled, skip_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False) != sampled


async def test_a_conversation_that_was_aborted_in_its_middle_goes_on_there(
    tmp_path: Path, engine: StandinEngine
) -> None:
    engine.faults.num_tokens_before_abort = 3
    async with stream(
        tmp_path, engine, groups_wanted=1, columns=COLUMNS, response_tokens=40, continues_aborted=True,
        **own("two_turns"),
    ) as parts:  # fmt: skip
        while not parts.producer.stats().groups_aborted:
            await asyncio.sleep(0.01)
        engine.version = "2"
        engine.faults.num_tokens_before_abort = None
        samples = (await accepted(parts, 1))[0]
    for sample in samples:
        check_two_turns(sample)
        assert {version for version, _, _ in sample.version_spans} == {1, 2}


async def test_an_answer_is_seen_while_it_is_made_and_left_early(
    tmp_path: Path, engine: StandinEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[tuple[int, int]]] = []
    monkeypatch.setattr(own_generate_functions, "PIECES", seen)
    async with stream(tmp_path, engine, groups_wanted=1, response_tokens=400, **own("leaving_early")) as parts:
        ((first, _),) = await accepted(parts, 1)
        assert parts.producer.stats().drifted_tokens == 0
        async with asyncio.timeout(20):
            while (await parts.client.metrics()).num_running:
                await asyncio.sleep(0.01)
    assert seen == [[(5, 5), (10, 10)]] * 2
    assert first.tokens[first.prompt_length + 10 : first.prompt_length + 13] == TOOL_TOKENS
    assert first.version_spans == [(1, 0, 10), (1, 13, 15)]
    assert first.weight_versions == ["1", "1", "1"]


STREAMING = {"generate_function_path": "vime.rollout.vllm_rollout.generate_streaming"}


async def test_a_streamed_answer_is_the_one_that_comes_at_once(tmp_path: Path, engine: StandinEngine) -> None:
    found = []
    for name, changes in (("at_once", {}), ("streamed", STREAMING)):
        (tmp_path / name).mkdir()
        async with stream(tmp_path / name, engine, groups_wanted=2, response_tokens=12, **changes) as parts:
            samples = [sample for group in await accepted(parts, 2) for sample in group]
        found.append({s.index: (s.tokens, s.rollout_log_probs, s.version_spans, s.response, s.status) for s in samples})
    assert found[0] == found[1]


async def test_what_an_engine_said_before_it_failed_is_kept_of_a_stream(
    tmp_path: Path, engine: StandinEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.serving_engines.GIVE_BACK_S", 0.02)
    engine.faults.step_s = 0.01
    async with stream(
        tmp_path, engine, groups_wanted=1, response_tokens=200, replaces_engines=True, continues_aborted=True,
        **STREAMING,
    ) as parts:  # fmt: skip
        async with asyncio.timeout(20):
            while engine.num_pieces < 6:
                await asyncio.sleep(0.01)
            engine.faults.dead = True
            while not parts.queue.yielded:
                await asyncio.sleep(0.01)
        stored = parts.pool.read_group(parts.queue.yielded[0].ref)
        samples = decode_group(stored.header, stored.columns)
        assert sum(sample.response_length for sample in samples) >= 20
        assert {sample.status for sample in samples} == {Sample.Status.ABORTED}
        assert parts.producer.stats().failed_samples == {}


async def test_a_stream_is_refused_where_training_needs_more_of_each_token(
    tmp_path: Path, engine: StandinEngine
) -> None:
    async with stream(tmp_path, engine, columns=COLUMNS, max_attempts=1, **STREAMING) as parts:
        while not parts.coordinator.counts().dropped:
            await asyncio.sleep(0.01)
        assert set(parts.coordinator.counts().dropped) == {"streamed_columns"}


async def test_segments_of_one_rollout_are_planned_and_trained_as_one(tmp_path: Path, engine: StandinEngine) -> None:
    async with stream(tmp_path, engine, groups_wanted=1, **own("two_segments")) as parts:
        samples = (await accepted(parts, 1))[0]
        (group,) = await parts.coordinator.wait_for_groups(1, 1) or []
    assert [sample.rollout_id for sample in samples] == [0, 0, 1, 1]
    assert group.summary.rollout_ids == [0, 0, 1, 1]
    assert [sample.reward for sample in samples] == [1.0] * 4


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raising", "generate_raised"),
        ("returning_text", "generate_answer"),
        ("hotter", "sampling_params"),
        ("retokenising", "retokenised"),
    ],
)
async def test_a_generate_function_that_fails_sets_its_sample_aside_with_a_reason(
    tmp_path: Path, engine: StandinEngine, name: str, reason: str
) -> None:
    async with stream(tmp_path, engine, groups_wanted=2, max_attempts=1, **own(name)) as parts:
        groups = await accepted(parts, 2)
        assert {group[0].group_index for group in groups} == {1, 2}
        assert parts.coordinator.counts().dropped == {reason: 1}
        assert parts.producer.stats().drifted_tokens == (2 if name == "retokenising" else 0)


async def test_a_generate_function_that_blocks_its_loop_holds_up_no_control_call(
    tmp_path: Path, engine: StandinEngine
) -> None:
    async with stream(tmp_path, engine, groups_wanted=1, **own("blocking")) as parts:
        while parts.producer.stats().in_flight_requests == 0:
            await asyncio.sleep(0.005)
        started = time.monotonic()
        parts.producer.gate.pause()
        await asyncio.sleep(0.05)
        assert time.monotonic() - started < 0.2
        parts.producer.gate.resume(1)
        assert len(await accepted(parts, 1)) == 1


async def test_a_function_is_told_of_evaluation_only_where_it_takes_that(tmp_path: Path, engine: StandinEngine) -> None:
    async with stream(tmp_path, engine, groups_wanted=1, **own("evaluating")) as parts:
        assert [sample.metadata["evaluation"] for sample in (await accepted(parts, 1))[0]] == [False, False]


async def test_hooks_see_each_sample_before_its_reward_in_their_order(tmp_path: Path, engine: StandinEngine) -> None:
    paths = (f"{FUNCTIONS}.count_calls", f"{FUNCTIONS}.replace_sample")
    async with stream(tmp_path, engine, groups_wanted=1, hook_paths=paths) as parts:
        samples = (await accepted(parts, 1))[0]
    assert [sample.metadata["hooks"] for sample in samples] == [["count", "replaced"]] * 2


async def test_a_hook_that_returns_no_sample_sets_its_sample_aside(tmp_path: Path, engine: StandinEngine) -> None:
    async with stream(
        tmp_path, engine, groups_wanted=1, max_attempts=1, hook_paths=(f"{FUNCTIONS}.odd_hook",)
    ) as parts:
        assert (await accepted(parts, 1))[0][0].group_index == 1
        assert parts.coordinator.counts().dropped == {"sample_hook_answer": 1}


async def test_a_second_attempt_starts_from_the_record_and_not_from_what_the_first_left_in_it(
    tmp_path: Path, engine: StandinEngine
) -> None:
    own_generate_functions.FAILED.clear()
    async with stream(tmp_path, engine, groups_wanted=1, **own("failing_once")) as parts:
        samples = (await accepted(parts, 1))[0]
    assert [sample.metadata["attempts"] for sample in samples] == [1, 1]
    assert {0, 1} == own_generate_functions.FAILED
