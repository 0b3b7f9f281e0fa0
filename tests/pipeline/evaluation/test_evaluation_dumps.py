"""The samples of an evaluation in a file of its own, beside those of rollout batches."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.evaluation.dumps import EvaluationDumps
from storage.archive import OWN_POOL, RolloutArchive
from storage.debug_samples import read_pt
from storage.pool import Pool
from storage.retention import Retention
from tests.pipeline.evaluation.eval_rig import by_label, evaluator, write_prompts
from tests.support.standin_engine import StandinEngine
from vime.utils.types import Sample


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    """Two data sets with two answers to each prompt."""
    first, second = write_prompts(tmp_path / "a.jsonl", [1, 0]), write_prompts(tmp_path / "b.jsonl", [1])
    return ["--eval-prompt-data", "a", str(first), "b", str(second), "--n-samples-per-eval-prompt", "2"]


def told(samples: list[Sample]) -> list[tuple[Any, ...]]:
    return [(vars(sample)["eval_data_set"], sample.index, sample.reward) for sample in samples]


SAMPLES = [("a", 0, 1.0), ("a", 1, 1.0), ("a", 2, 0.0), ("a", 3, 0.0), ("b", 0, 1.0), ("b", 1, 1.0)]


async def test_a_pt_file_holds_the_samples_of_every_data_set(
    tmp_path: Path, engine: StandinEngine, argv: list[str]
) -> None:
    dumps = EvaluationDumps(f"{tmp_path}/{{rollout_id:03d}}.pt", None)
    async with evaluator(tmp_path, engine, argv, dumps=dumps) as rig:
        record = await rig.evaluator.evaluate(5, "branch")
    assert record.warnings == []
    samples = read_pt(tmp_path / "eval_005.pt")
    assert told(samples) == SAMPLES
    assert {(sample.response_length, sample.min_version()) for sample in samples} == {(6, 1)}


async def test_an_archive_says_that_it_is_of_an_evaluation_and_keeps_its_groups_in_the_runs_pool(
    tmp_path: Path, engine: StandinEngine, argv: list[str]
) -> None:
    with Pool.create(tmp_path / "pool", "run") as pool:
        dumps = EvaluationDumps(f"{tmp_path}/{{rollout_id}}.straw.json", partial(Pool.open, tmp_path / "pool"))
        async with evaluator(tmp_path, engine, argv, dumps=dumps) as rig:
            await rig.evaluator.evaluate(5, "first")
            again = await rig.evaluator.evaluate(5, "second")
        with RolloutArchive.open(tmp_path / "eval_5.straw.json") as archive:
            assert (archive.index.evaluation, archive.rollout_id) == (True, 5)
            assert told(archive.load_samples()) == SAMPLES
            assert [key.sample_key for key in archive.keys] == [f"sample:{number}" for number in range(6)]
            assert Retention(pool.control_dir).retained_packs() >= {group.ref.path for group in archive.index.groups}
    assert "this one's samples are in eval_5.second.straw.json" in again.warnings[0]


async def test_an_archive_of_a_run_in_memory_has_a_pool_beside_it(
    tmp_path: Path, engine: StandinEngine, argv: list[str]
) -> None:
    async with evaluator(
        tmp_path, engine, argv, dumps=EvaluationDumps(f"{tmp_path}/{{rollout_id}}.straw.json", None)
    ) as rig:
        await rig.evaluator.evaluate(0, "branch")
    with RolloutArchive.open(tmp_path / "eval_0.straw.json") as archive:
        assert archive.pool.root == tmp_path / OWN_POOL / "pool"
        assert told(archive.load_samples()) == SAMPLES


@pytest.mark.parametrize("ending", [".pt", ".straw.json"])
async def test_answers_that_failed_are_in_the_file_too(
    tmp_path: Path, engine: StandinEngine, argv: list[str], ending: str
) -> None:
    async def fails_for_b(args: Any, sample: Sample) -> Any:
        return None if "prompt 1" in str(sample.prompt) else await by_label(args, sample)

    dumps = EvaluationDumps(f"{tmp_path}/{{rollout_id}}{ending}", None)
    async with evaluator(tmp_path, engine, argv, dumps=dumps, reward=fails_for_b) as rig:
        record = await rig.evaluator.evaluate(0, "branch")
    assert record.data_sets[0].failed == {"reward_none": 2}
    assert record.warnings == []


async def test_files_that_can_not_be_written_cost_themselves_and_not_the_result(
    tmp_path: Path, engine: StandinEngine, argv: list[str]
) -> None:
    for name in ("out", "evaluations"):
        (tmp_path / name).write_text("a file in the way")
    dumps = EvaluationDumps(f"{tmp_path}/out/{{rollout_id}}.pt", None)
    async with evaluator(tmp_path, engine, argv, dumps=dumps) as rig:
        record = await rig.evaluator.evaluate(0, "branch")
    assert (record.metrics["eval/a"], record.answers_file) == (0.5, "")
    answers, dump = record.warnings
    assert answers.startswith("the answers were not kept: ")
    assert f"are not in {tmp_path}/out/eval_0.pt" in dump


@pytest.mark.parametrize("ending", [".pt", ".straw.json"])
async def test_samples_that_can_not_be_stored_cost_the_file_and_not_the_result(
    tmp_path: Path, engine: StandinEngine, argv: list[str], ending: str
) -> None:
    async def annotating(args: Any, sample: Sample) -> float:
        sample.metadata["judge"] = object()
        return await by_label(args, sample)

    dumps = EvaluationDumps(f"{tmp_path}/{{rollout_id}}{ending}", None)
    async with evaluator(tmp_path, engine, argv, dumps=dumps, reward=annotating) as rig:
        record = await rig.evaluator.evaluate(0, "branch")
    assert record.metrics["eval/a"] == 0.5
    (warning,) = record.warnings
    assert f"the samples of the evaluation after step 0 are not in {tmp_path}/eval_0{ending}: " in warning
    assert "judge" in warning
