"""From flags and the file of data sets to what is asked and how it is scored."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.evaluation.evaluator import Evaluator
from pipeline.evaluation.own_function import OwnEvaluator
from pipeline.evaluation.prompts import eval_sampling, open_eval_sets, set_aside_words
from pipeline.evaluation.wiring import build_evaluator
from pipeline.request_gate import RequestGate
from pipeline.serving_engines import ServingEngines
from tests.support.standin_engine import StandinEngine
from tests.support.tiny_models import VOCAB_SIZE, build_tokenizer
from vime.backends.vllm_utils.client import EngineClient
from vime.errors import BadRecordError
from vime.rollout.sampling import SamplingSettings
from vime.settings.groups import Settings
from vime.settings.parse import HookArgs, parse_settings

OWN = "tests.pipeline.evaluation.own_eval_functions"


def settings_of(folder: Path, eval_config: str, *argv: str) -> Settings:
    """Prompts are `1+1=` and `22+22=`, with their sums as labels."""
    (folder / "p.jsonl").write_text('{"input": "1+1=", "sum": "2"}\n{"input": "22+22=", "sum": "44"}\n')
    (folder / "eval.yaml").write_text(eval_config.replace("p.jsonl", str(folder / "p.jsonl")))
    build_tokenizer(folder / "model")
    given = ["--hf-checkpoint", str(folder / "model"), "--save", str(folder / "run"), "--eval-label-key", "sum"]
    return parse_settings(
        [*given, "--rollout-max-response-len", "4", "--eval-config", str(folder / "eval.yaml"), *argv]
    )


async def test_each_data_set_is_scored_by_its_own_reward(tmp_path: Path) -> None:
    settings = settings_of(
        tmp_path,
        f"eval: {{datasets: [{{name: a, path: p.jsonl, custom_rm_path: {OWN}.one}}, {{name: b, path: p.jsonl}}]}}",
        *("--custom-rm-path", f"{OWN}.quarter"),
    )
    with StandinEngine(VOCAB_SIZE) as engine:
        async with EngineClient(engine.address) as client:
            gate = RequestGate(ServingEngines([client]))
            built = build_evaluator(settings, gate, 1, HookArgs(settings))
            assert built is not None
            evaluator, closers = built
            assert isinstance(evaluator, Evaluator)
            gate.resume(1)
            record = await evaluator.evaluate(0, "branch")
            for close in closers:
                await close()
    assert (record.metrics["eval/a"], record.metrics["eval/b"]) == (1.0, 0.25)


def test_a_function_of_ones_own_evaluates_in_vimes_place(tmp_path: Path) -> None:
    sets = "eval: {datasets: [{name: a, path: p.jsonl, rm_type: math}]}"
    settings = settings_of(tmp_path, sets, "--eval-function-path", f"{OWN}.evaluate")
    built = build_evaluator(settings, RequestGate(ServingEngines([])), 1, HookArgs(settings))
    assert built is not None
    assert isinstance(built[0], OwnEvaluator)


def test_a_run_without_data_sets_has_no_evaluator() -> None:
    settings = parse_settings(["--rm-type", "math"])
    assert build_evaluator(settings, RequestGate(ServingEngines([])), 1, HookArgs(settings)) is None


def test_samples_are_numbered_alike_in_every_evaluation_and_carry_the_overrides(tmp_path: Path) -> None:
    settings = settings_of(
        tmp_path,
        "eval: {datasets: [{name: a, path: p.jsonl, n_samples_per_eval_prompt: 2, rm_type: math, "
        "metadata_overrides: {source_name: sums}, custom_generate_function_path: own.generate}]}",
    )
    (opened,) = open_eval_sets(settings)
    samples = [sample for sample, _ in opened.samples()]
    assert [(sample.group_index, sample.index, sample.label) for sample in samples] == [
        (0, 0, "2"), (0, 1, "2"), (1, 2, "44"), (1, 3, "44")
    ]  # fmt: skip
    assert samples[0].metadata == {"source_name": "sums", "rm_type": "math"}
    assert samples[0].generate_function_path == "own.generate"
    assert samples[0].metadata is not samples[1].metadata


def test_a_data_set_samples_by_its_own_options_and_with_seeds_of_its_own(tmp_path: Path) -> None:
    settings = settings_of(
        tmp_path,
        "eval: {datasets: [{name: a, path: p.jsonl, temperature: 0, top_p: 0.5, top_k: 9, max_response_len: 3, "
        "min_new_tokens: 2, max_context_len: 8, stop: [x], stop_token_ids: [5]}, {name: b, path: p.jsonl}]}",
        *("--rollout-temperature", "0.7", "--rollout-skip-special-tokens"),
    )
    first, second = (eval_sampling(each.options, settings, 1) for each in open_eval_sets(settings))
    assert first == SamplingSettings(
        3, 0.0, top_p=0.5, top_k=9, min_response_tokens=2, max_context_tokens=8, stop=("x",), stop_token_ids=(5,),
        skip_special_tokens=True, seed=first.seed,
    )  # fmt: skip
    assert (second.max_response_tokens, second.temperature, second.top_k) == (4, 0.7, -1)
    assert first.seed != second.seed
    assert eval_sampling(open_eval_sets(settings)[0].options, settings, 1).seed == first.seed
    assert eval_sampling(open_eval_sets(settings)[0].options, settings, None).seed is None


def test_prompts_that_are_left_out_are_told_with_their_data_set(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "eval: {datasets: [{name: a, path: p.jsonl, max_prompt_len: 5}]}")
    (words,) = set_aside_words(open_eval_sets(settings)[0])
    assert words.startswith("Evaluation data set a: 1 of 2 records are too long and are left out. The first: ")


def test_a_bad_record_stops_the_start_and_names_data_set_and_line(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "eval: {datasets: [{name: a, path: p.jsonl, input_key: question}]}")
    with pytest.raises(BadRecordError, match=r"evaluation data set a: .*p\.jsonl:1"):
        open_eval_sets(settings)
