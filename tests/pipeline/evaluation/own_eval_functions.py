"""Evaluation and report functions of a user's own."""

from __future__ import annotations

import asyncio
from typing import Any

from vime.rollout.base_types import RolloutFnEvalOutput
from vime.rollout.vllm_rollout import generate_rollout
from vime.utils.types import Sample

REPORTED: list[tuple[int, dict[str, Any], dict[str, float]]] = []


def sampled(version: int) -> Sample:
    return Sample(
        prompt="question", response="answer", tokens=[1, 2, 3], response_length=2, version_spans=[(version, 0, 2)]
    )


def evaluate(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnEvalOutput:
    assert (args, data_source, evaluation) == ("args", None, True)
    data = {"a": {"rewards": [1.0, 0.0, 1.0, None], "truncated": [True, False, False, False],
                  "samples": [sampled(7)] * 4}}  # fmt: skip
    return RolloutFnEvalOutput(data, {"eval/own": rollout_id})


async def evaluate_later(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> dict[str, Any]:  # noqa: ARG001
    await asyncio.sleep(0)
    return {"a": {"rewards": [0.25]}}


def halving(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnEvalOutput:
    output: Any = generate_rollout(args, rollout_id, data_source, evaluation)
    output.data["a"]["rewards"] = [reward / 2 for reward in output.data["a"]["rewards"]]
    return output


def raises(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> None:  # noqa: ARG001
    raise ZeroDivisionError("no prompts")


def returns_text(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> str:  # noqa: ARG001
    return "fine"


def uneven(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> dict[str, Any]:  # noqa: ARG001
    return {"a": {"rewards": [0.25], "truncated": [True, False]}}


def report(rollout_id: int, args: Any, data: dict[str, Any], extra_metrics: dict[str, float]) -> bool:  # noqa: ARG001
    REPORTED.append((rollout_id, data, extra_metrics))
    return True


def report_badly(rollout_id: int, args: Any, data: dict[str, Any], extra_metrics: dict[str, float]) -> bool:  # noqa: ARG001
    raise KeyError("board")


async def one(args: Any, sample: Sample) -> float:  # noqa: ARG001
    return 1.0


async def quarter(args: Any, sample: Sample) -> float:  # noqa: ARG001
    return 0.25
