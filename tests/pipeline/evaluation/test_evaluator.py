"""Evaluations on a stand-in engine: every answer is scored or counted as failed, and knows the policy that made it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.evaluation.eval_rig import evaluator, write_prompts
from tests.support.standin_engine import StandinEngine
from vime.backends.vllm_utils.protocol import SampleColumns
from vime.utils.types import Sample


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    """Two data sets: half of the answers are right in one, all in the other."""
    half, all_right = write_prompts(tmp_path / "a.jsonl", [1, 0]), write_prompts(tmp_path / "b.jsonl", [1])
    return ["--eval-prompt-data", "half", str(half), "all", str(all_right), "--n-samples-per-eval-prompt", "4"]


async def test_every_data_set_is_answered_and_scored(tmp_path: Path, engine: StandinEngine, argv: list[str]) -> None:
    async with evaluator(tmp_path, engine, argv) as rig:
        record = await rig.evaluator.evaluate(5, "branch")
        answers = rig.answers(5)
    assert (record.evaluation, record.branch, record.policy_version) == (5, "branch", 1)
    assert record.metrics["eval/half"] == 0.5
    assert [record.metrics[f"eval/half-pass@{k}"] for k in (1, 2, 4)] == [0.5, 0.5, 0.5]
    assert (record.metrics["eval/all"], record.metrics["eval/all-pass@4"]) == (1.0, 1.0)
    assert record.metrics["eval/all/response_len/mean"] == 6.0
    assert record.metrics["eval/all-truncated_ratio"] == 1.0
    assert [(each.prompts, each.answers, each.failed) for each in record.data_sets] == [(2, 8, {}), (1, 4, {})]
    assert [(a["data_set"], a["prompt_number"], a["attempt"]) for a in answers][:5] == [
        ("half", 0, 0), ("half", 0, 1), ("half", 0, 2), ("half", 0, 3), ("half", 1, 0)
    ]  # fmt: skip
    assert (answers[0]["prompt"], answers[0]["label"], answers[0]["reward"]) == ("prompt 0", 1, 1.0)
    assert len(answers[0]["response"]) == answers[0]["response_tokens"] == 6
    assert answers[0]["source"].endswith("a.jsonl:1")


async def test_no_columns_of_training_are_asked_for(tmp_path: Path, engine: StandinEngine, argv: list[str]) -> None:
    """The stand-in refuses more candidates than it has tokens."""
    too_many = SampleColumns(num_candidates=engine.vocab_size + 1, routes=True)
    async with evaluator(tmp_path, engine, argv, columns=too_many) as rig:
        assert (await rig.evaluator.evaluate(0, "branch")).metrics["eval/half-failed_ratio"] == 0.0


async def test_a_publication_in_between_marks_the_result_mixed_with_its_versions(
    tmp_path: Path, engine: StandinEngine, argv: list[str]
) -> None:
    first = asyncio.Event()

    async def note_first(args: Any, sample: Sample) -> float:  # noqa: ARG001
        first.set()
        return 1.0

    async with evaluator(tmp_path, engine, argv, max_requests=1, reward=note_first) as rig:
        running = asyncio.create_task(rig.evaluator.evaluate(1, "branch"))
        await first.wait()
        await rig.client.pause("keep")
        engine.version = "2"
        await rig.client.resume()
        record = await running
    assert (record.policy_version, record.policy_versions) == (None, [1, 2])
    whole = next(each for each in record.data_sets if each.name == "all")
    assert (whole.policy_version, whole.policy_versions) == (2, [2])


async def test_an_aborted_answer_is_made_anew_by_one_policy(tmp_path: Path, engine: StandinEngine) -> None:
    prompts = write_prompts(tmp_path / "a.jsonl", [1])
    async with evaluator(tmp_path, engine, ["--eval-prompt-data", "a", str(prompts)]) as rig:
        engine.faults.num_tokens_before_abort = 3
        running = asyncio.create_task(rig.evaluator.evaluate(1, "branch"))
        while rig.gate.num_requests == 0:
            await asyncio.sleep(0)
        rig.gate.pause()
        while rig.gate.num_requests:
            await asyncio.sleep(0.01)
        engine.version, engine.faults.num_tokens_before_abort = "2", None
        rig.gate.resume(2)
        record = await running
    assert (record.policy_version, record.policy_versions) == (2, [2])
    assert record.metrics["eval/a"] == 1.0


async def hangs_for_zero(args: Any, sample: Sample) -> float:  # noqa: ARG001
    if sample.label == 0:
        await asyncio.Event().wait()
    return 1.0


async def test_an_answer_that_fails_is_counted_under_its_reason_and_is_not_wrong(
    tmp_path: Path, engine: StandinEngine, argv: list[str]
) -> None:
    async with evaluator(tmp_path, engine, argv, reward=hangs_for_zero, reward_timeout_s=0.05) as rig:
        record = await rig.evaluator.evaluate(1, "branch")
        failed = [answer for answer in rig.answers(1) if answer["failure"]]
    assert record.data_sets[0].failed == {"reward_timeout": 4}
    assert (record.metrics["eval/half"], record.metrics["eval/half-failed_ratio"]) == (1.0, 0.5)
    assert [(answer["prompt_number"], answer["reward"]) for answer in failed] == [(1, None)] * 4
    assert "took longer than 0.05 s" in failed[0]["error"]
    assert failed[0]["response"]


async def test_an_engine_that_fails_once_costs_no_answer(
    tmp_path: Path, engine: StandinEngine, argv: list[str]
) -> None:
    async with evaluator(tmp_path, engine, argv) as rig:
        engine.faults.num_dropped_connections = 2
        record = await rig.evaluator.evaluate(1, "branch")
    assert [each.failed for each in record.data_sets] == [{}, {}]


async def test_an_engine_that_goes_on_failing_is_the_reason(
    tmp_path: Path, engine: StandinEngine, argv: list[str]
) -> None:
    async with evaluator(tmp_path, engine, argv) as rig:
        engine.faults.steps = {"/inference/v1/sample": "error"}
        record = await rig.evaluator.evaluate(1, "branch")
        (first, *_) = rig.answers(1)
    assert [each.failed for each in record.data_sets] == [{"engine": 8}, {"engine": 4}]
    assert record.policy_version is None
    assert "eval/half" not in record.metrics
    assert "answered 500" in first["error"]


async def test_a_slow_judge_does_not_hold_up_the_end_of_generation(
    tmp_path: Path, engine: StandinEngine, argv: list[str]
) -> None:
    judge = asyncio.Event()

    async def slow(args: Any, sample: Sample) -> float:  # noqa: ARG001
        await judge.wait()
        return 1.0

    async with evaluator(tmp_path, engine, argv, reward=slow) as rig:
        running = asyncio.create_task(rig.evaluator.evaluate(1, "branch"))
        await asyncio.sleep(0)
        await asyncio.wait_for(rig.evaluator.generated(1, "branch"), 10)
        assert not running.done()
        assert rig.gate.num_requests == 0
        judge.set()
        assert (await running).metrics["eval/half"] == 1.0
        await rig.evaluator.generated(1, "branch")


async def test_who_asks_for_the_end_of_generation_before_an_evaluation_begins_waits_for_its_responses(
    tmp_path: Path, engine: StandinEngine, argv: list[str]
) -> None:
    async with evaluator(tmp_path, engine, argv) as rig:
        generated = asyncio.create_task(rig.evaluator.generated(1, "branch"))
        await asyncio.sleep(0)
        assert not generated.done()
        await rig.evaluator.evaluate(1, "branch")
        await asyncio.wait_for(generated, 10)


async def test_the_same_step_of_another_branch_is_an_evaluation_of_its_own(
    tmp_path: Path, engine: StandinEngine, argv: list[str]
) -> None:
    async with evaluator(tmp_path, engine, argv) as rig:
        await rig.evaluator.evaluate(1, "left")
        generated = asyncio.create_task(rig.evaluator.generated(1, "right"))
        await asyncio.sleep(0)
        assert not generated.done()
        await asyncio.gather(rig.evaluator.evaluate(1, "right"), rig.evaluator.evaluate(1, "third"))
        await asyncio.wait_for(generated, 10)


async def test_prompts_that_are_too_long_are_left_out(tmp_path: Path, engine: StandinEngine) -> None:
    (tmp_path / "a.jsonl").write_text('{"input": "short", "answer": 1}\n{"input": "much longer", "answer": 0}\n')
    argv = ["--eval-prompt-data", "a", str(tmp_path / "a.jsonl"), "--eval-max-context-len", "9"]
    async with evaluator(tmp_path, engine, argv) as rig:
        record = await rig.evaluator.evaluate(0, "branch")
        (answer,) = rig.answers(0)
    assert record.metrics["eval/a"] == 1.0
    assert (answer["prompt_tokens"], answer["response_tokens"]) == (5, 4)
