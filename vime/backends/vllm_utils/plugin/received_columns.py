"""Columns in vLLM's API server: what a step brings goes to its requests, without an object for each token."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from vllm.v1.engine import output_processor
from vllm.v1.engine.core_client import AsyncMPClient

from vime.backends.vllm_utils.plugin.columns import ColumnRequest, column_request
from vime.backends.vllm_utils.plugin.request_columns import ReceivedColumns
from vime.backends.vllm_utils.plugin.step_columns import NO_ROW, ReceivedStep, StepPart


class _PartProcessor:
    """Stands in for vLLM's `LogprobsProcessor` of one request; its `logprobs` are what `CompletionOutput` holds."""

    prompt_logprobs = None
    cumulative_logprob = None
    prompt_token_id_logprobs = None
    num_prompt_logprobs = None

    def __init__(self, request: ColumnRequest) -> None:
        self.num_logprobs = request.num_candidates
        self.logprobs = ReceivedColumns(request)

    def pop_prompt_logprobs(self) -> None:
        """Columns have none of the prompt."""

    def pop_prompt_token_id_logprobs(self) -> None:
        """Columns have none of the prompt."""

    def update_from_output(self, output: Any) -> None:
        if output.new_logprobs is not None:
            self.logprobs.add(output.new_logprobs)


def hand_out(outputs: Sequence[Any]) -> None:
    """Give each output of a message from the core its part of the step that one of them carries, if one does."""
    carrier = next((output for output in outputs if _is_step(output.new_logprobs)), None)
    if carrier is None:
        return
    step = ReceivedStep(carrier.new_logprobs.logprob_token_ids, carrier.new_logprobs.logprobs)
    carrier.new_logprobs = None
    for number, (output, row) in enumerate(zip(outputs, step.first_rows, strict=True)):
        if row != NO_ROW or (step.routes is not None and len(step.routes[number])):
            output.new_logprobs = StepPart(step, number, len(output.new_token_ids))


def _is_step(found: Any) -> bool:
    """vLLM's own log-probabilities are numbers of another type."""
    return found is not None and found.logprobs.dtype == np.uint8


def install() -> None:
    """Extend vLLM's classes in this process; may be called more than once."""
    stock = output_processor.LogprobsProcessor
    if "vime_stock" in vars(stock):
        return

    class Dispatching(stock):  # type: ignore[misc, valid-type]
        vime_stock = stock

        @classmethod
        def from_new_request(cls, tokenizer: Any, request: Any) -> Any:
            wanted = column_request(request.sampling_params)
            if wanted is not None:
                return _PartProcessor(wanted)
            return stock.from_new_request(tokenizer=tokenizer, request=request)

    output_processor.LogprobsProcessor = Dispatching
    AsyncMPClient.get_output_async = _handing_out(AsyncMPClient.get_output_async)


def _handing_out(get_output: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get_output)
    async def extended(client: Any) -> Any:
        message = await get_output(client)
        hand_out(message.outputs)
        return message

    return extended
