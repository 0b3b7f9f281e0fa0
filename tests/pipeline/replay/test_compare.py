"""The comparison of a replay says bitwise equal, or where the first difference is."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pipeline.replay.compare import compare, sample_changes
from pipeline.step_results import RolloutResult, StepResult

LAYOUT: dict[str, str | int] = {"ranks": 1, "threads": 2}


def result(rollout_id: int = 3, rank: int = 0, **changed: Any) -> RolloutResult:
    steps = [
        StepResult({"loss": 0.5 + step, "ppo_kl": 0.0, "grad_norm": 2.0}, {7: 0.25, 8: 0.25 + step})
        for step in range(2)
    ]
    found = RolloutResult(
        branch="a", rollout_id=rollout_id, rank=rank, layout=LAYOUT, steps=steps, parameters={"w": "00", "v": "11"}
    )
    return msgspec.structs.replace(found, **changed)


def with_step(
    step: int, metrics: dict[str, float] | None = None, losses: dict[int, float] | None = None
) -> RolloutResult:
    steps = list(result().steps)
    old = steps[step]
    steps[step] = StepResult(old.metrics | (metrics or {}), old.sample_losses | (losses or {}))
    return result(steps=steps)


def test_equal_results_are_bitwise_equal() -> None:
    comparison = compare([result()], [result()], 1e-3)
    assert comparison.words == "bitwise equal (12 values compared)"
    assert comparison.differences == []


@pytest.mark.parametrize(
    ("found", "first"),
    [
        (
            with_step(1, {"grad_norm": 2.0000000000000004}),
            "rollout 3, step 1, grad_norm: the run has 2.0, the replay 2.0",
        ),
        (with_step(0, {"loss": 1.0, "grad_norm": 3.0}, {8: 0.5}), "step 0, loss of sample 8: the run has 0.25, the"),
        (with_step(0, {"loss": 1.0, "ppo_kl": 1.0}), "step 0, loss: the run has 0.5, the replay 1.0"),
        (result(parameters={"w": "00", "v": "12"}), "step 1, parameter v (rank 0): the run has 11, the replay 12"),
        (with_step(0, {"more": 1.0}), "step 0, more: the run has none, the replay 1.0"),
        (result(steps=result().steps[:1]), "step 1, loss of sample 7: the run has 0.25, the replay none"),
    ],
)
def test_the_first_difference_is_named(found: RolloutResult, first: str) -> None:
    comparison = compare([result()], [found], 1e-3)
    assert comparison.exact
    assert comparison.words.startswith("not bitwise equal: differs first at ")
    assert first in comparison.words


def test_an_earlier_rollout_comes_before_a_later_one() -> None:
    logged, found = [result(3), result(4)], [result(3, parameters={"w": "00", "v": "12"}), with_step(0, {"loss": 9.0})]
    found[1] = msgspec.structs.replace(found[1], rollout_id=4)
    assert "rollout 3, step 1, parameter v" in compare(logged, found, 1e-3).words


def test_another_layout_is_compared_within_the_tolerance_and_said() -> None:
    two = {**LAYOUT, "ranks": 2}
    halves = [
        result(layout=two, steps=[StepResult(s.metrics, {7: 0.25}) for s in result().steps]),
        result(layout=two, rank=1, steps=[StepResult(s.metrics, {8: s.sample_losses[8]}) for s in result().steps]),
    ]
    comparison = compare(halves, [with_step(1, {"loss": 1.5001})], 1e-3)
    assert comparison.layout_differences == ["ranks: 2 in the run, 1 here"]
    assert comparison.words == "equal within 0.001 (10 values compared)"
    assert "not equal within" in compare(halves, [with_step(1, {"loss": 1.51})], 1e-3).words


def test_a_rollout_that_the_run_did_not_log_is_not_compared() -> None:
    assert compare([result(3)], [result(3), result(4)], 1e-3).differences == []
    assert compare([], [result(3)], 1e-3).words == "Nothing was logged that could be compared."


def test_changes_of_samples_come_largest_first() -> None:
    changes = sample_changes([with_step(1, losses={7: 0.25, 8: 0.5})], [with_step(1, losses={7: 0.3, 8: 0.9})])
    assert [(change.sample_index, change.found) for change in changes] == [(8, 0.9), (7, 0.3)]
