"""Answers as vLLM gives them itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy.typing as npt
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams

from vime.backends.vllm_utils.plugin.self_test import StockAnswer


async def stock_answer(
    engine: Any, num_dense_layers: int, prompt: list[int], sampling: dict[str, Any], salt: str
) -> StockAnswer:
    """The answer of vLLM's own way to a request; `sampling` are fields of `SamplingParams`."""
    parameters = SamplingParams(**sampling)
    parameters.output_kind = RequestOutputKind.FINAL_ONLY
    result = await last_output(engine.generate(tokens_input(prompt, cache_salt=salt), parameters, f"stock-{salt}"))
    (output,) = result.outputs
    listed = [{token: value.logprob for token, value in position.items()} for position in output.logprobs]
    labels = vars(output).get("weight_versions")  # vLLM before 0.32 has none
    return StockAnswer(
        list(output.token_ids),
        output.finish_reason,
        listed,
        moe_layers(output.routed_experts, num_dense_layers),
        None if labels is None else [(label.version, label.start, label.end) for label in labels],
    )


async def last_output(outputs: AsyncIterator[Any]) -> Any:
    """The one output of a request that asks for a final one only."""
    *_, last = [output async for output in outputs]
    return last


def moe_layers(routes: npt.NDArray[Any] | None, num_dense_layers: int) -> npt.NDArray[Any] | None:
    """vLLM's own routes [rows, L, K] count every layer, those without experts too; here they are left out."""
    return None if routes is None else routes[:, num_dense_layers:]
