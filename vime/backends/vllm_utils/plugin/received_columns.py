"""Columns in vLLM's API server: blocks are joined as they come, without an object for each token."""

from __future__ import annotations

from typing import Any

from vllm.v1.engine import output_processor

from vime.backends.vllm_utils.plugin.columns import ColumnRequest, ReceivedColumns, column_request


class _BlockProcessor:
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
            self.logprobs.add(output.new_logprobs.logprob_token_ids.data)


def install() -> None:
    """Extend vLLM's output processor in this process; may be called more than once."""
    stock = output_processor.LogprobsProcessor
    if "vime_stock" in vars(stock):
        return

    class Dispatching(stock):  # type: ignore[misc, valid-type]
        vime_stock = stock

        @classmethod
        def from_new_request(cls, tokenizer: Any, request: Any) -> Any:
            wanted = column_request(request.sampling_params)
            if wanted is not None:
                return _BlockProcessor(wanted)
            return stock.from_new_request(tokenizer=tokenizer, request=request)

    output_processor.LogprobsProcessor = Dispatching
