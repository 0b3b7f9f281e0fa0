"""Evaluation and its report by functions of the user's own."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.evaluation.dumps import EvaluationDumps
from pipeline.evaluation.keeper import ResultKeeper
from pipeline.evaluation.log_function import EvalLog
from pipeline.evaluation.own_function import OwnEvaluator, StockResults, own_eval_function
from pipeline.evaluation.records import EvaluationRecord
from tests.pipeline.evaluation import own_eval_functions
from tests.pipeline.evaluation.eval_rig import evaluator, write_prompts
from tests.support.standin_engine import StandinEngine
from vime.errors import RunFailedError
from vime.rollout.vllm_rollout import generate_rollout
from vime.settings.parse import parse_settings

OWN = "tests.pipeline.evaluation.own_eval_functions"


async def nothing() -> dict[str, dict[str, Any]]:
    return {}


def own_evaluator(
    folder: Path,
    name: str,
    attempts: dict[str, int],
    stock: StockResults = nothing,
    log: EvalLog | None = None,
    dumps: EvaluationDumps | None = None,
) -> OwnEvaluator:
    return OwnEvaluator(f"{OWN}.{name}", "args", attempts, ResultKeeper(folder, log, dumps), stock)


async def evaluated(folder: Path, name: str) -> EvaluationRecord:
    return await own_evaluator(folder, name, {"a": 2}).evaluate(4, "branch")


async def test_what_the_function_returned_is_scored_labelled_and_kept(tmp_path: Path) -> None:
    record = await evaluated(tmp_path, "evaluate")
    assert record.metrics["eval/a"] == pytest.approx(2 / 3)
    assert (record.metrics["eval/a-pass@1"], record.metrics["eval/a-pass@2"]) == (0.75, 1.0)
    assert (record.metrics["eval/own"], record.policy_version) == (4.0, 7)
    assert [(each.prompts, each.failed) for each in record.data_sets] == [(2, {"reward_none": 1})]
    first, *_ = map(json.loads, (tmp_path / "evaluations" / "4.jsonl").read_text().splitlines())
    assert (first["response"], first["status"], first["reward"]) == ("answer", "truncated", 1.0)


async def test_a_coroutine_that_returns_plain_data_is_taken_too(tmp_path: Path) -> None:
    record = await evaluated(tmp_path, "evaluate_later")
    assert (record.metrics["eval/a"], record.policy_version, record.problem) == (0.25, None, "")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("raises", "raises raised ZeroDivisionError: no prompts"),
        ("returns_text", "returns_text: it returned a str, allowed: a RolloutFnEvalOutput"),
        ("uneven", "uneven: data set a has 1 rewards, 2 truncated and 1 samples, allowed: equally many"),
        ("absent", "absent: .*absent"),
    ],
)
async def test_what_goes_wrong_is_the_records_problem(tmp_path: Path, name: str, problem: str) -> None:
    evaluator = own_evaluator(tmp_path, name, {})
    record = await evaluator.evaluate(4, "branch")
    assert record.metrics == {}
    assert re.search(problem, record.problem)
    await evaluator.generated(4, "branch")


async def test_who_asks_for_the_functions_end_before_it_is_called_waits_for_it(tmp_path: Path) -> None:
    evaluator = own_evaluator(tmp_path, "evaluate", {"a": 2})
    generated = asyncio.create_task(evaluator.generated(4, "branch"))
    await asyncio.sleep(0)
    assert not generated.done()
    await evaluator.evaluate(4, "branch")
    await asyncio.wait_for(generated, 10)


def test_a_rollout_function_evaluates_unless_requests_outlive_publications() -> None:
    own = ["--rollout-function-path", "own.rollout"]
    assert own_eval_function(parse_settings(own)) == "own.rollout"
    assert own_eval_function(parse_settings([*own, "--flush-cache-interval", "0"])) is None
    assert own_eval_function(parse_settings([*own, "--eval-function-path", "own.evaluate"])) == "own.evaluate"
    assert own_eval_function(parse_settings([])) is None


async def test_a_function_may_change_the_results_of_vimes_own_evaluation(tmp_path: Path, engine: StandinEngine) -> None:
    prompts = write_prompts(tmp_path / "a.jsonl", [1, 0])
    async with evaluator(tmp_path, engine, ["--eval-prompt-data", "a", str(prompts)]) as rig:
        record = await own_evaluator(tmp_path, "halving", {}, rig.evaluator.results).evaluate(4, "branch")
    assert (record.metrics["eval/a"], record.policy_version, record.problem) == (0.25, 1, "")
    assert record.data_sets[0].answers == 2


def test_vimes_own_evaluation_is_asked_for_inside_an_evaluation_alone() -> None:
    with pytest.raises(RunFailedError, match="where none is being made"):
        generate_rollout(None, 0, None, evaluation=True)


async def test_a_report_of_ones_own_gets_samples_and_replaces_vimes(tmp_path: Path, engine: StandinEngine) -> None:
    prompts = write_prompts(tmp_path / "a.jsonl", [1, 0])
    own_eval_functions.REPORTED.clear()
    async with evaluator(tmp_path, engine, ["--eval-prompt-data", "a", str(prompts)], log=f"{OWN}.report") as rig:
        record = await rig.evaluator.evaluate(3, "branch")
    assert record.is_reported
    ((step, data, metrics),) = own_eval_functions.REPORTED
    assert (step, metrics["eval/a"]) == (3, 0.5)
    assert (data["a"]["rewards"], data["a"]["truncated"]) == ([1.0, 0.0], [True, True])
    assert [sample.label for sample in data["a"]["samples"]] == [1, 0]


async def test_a_report_that_raises_is_a_warning_beside_vimes_own(tmp_path: Path) -> None:
    log = EvalLog(f"{OWN}.report_badly", "args")
    record = await own_evaluator(tmp_path, "evaluate_later", {}, log=log).evaluate(4, "branch")
    assert not record.is_reported
    assert record.warnings == [f"--custom-eval-rollout-log-function-path {OWN}.report_badly raised KeyError: 'board'"]
