"""Columns in vLLM's API server: blocks are kept as they came, without an object for each token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.v1.engine import output_processor

from vime.backends.vllm_utils.plugin.columns import ColumnRequest, Columns, column_request, join_blocks


@dataclass
class ReceivedBlocks:
    """What `CompletionOutput.logprobs` holds of a request for columns."""

    request: ColumnRequest
    blocks: list[bytes] = field(default_factory=list)

    def join(self) -> Columns:
        return join_blocks(self.blocks, self.request)


class _BlockProcessor:
    """Stands in for vLLM's `LogprobsProcessor` of one request."""

    prompt_logprobs = None
    cumulative_logprob = None
    prompt_token_id_logprobs = None
    num_prompt_logprobs = None

    def __init__(self, request: ColumnRequest) -> None:
        self.num_logprobs = request.num_candidates
        self.logprobs = ReceivedBlocks(request)

    def pop_prompt_logprobs(self) -> None:
        """Columns have none of the prompt."""

    def pop_prompt_token_id_logprobs(self) -> None:
        """Columns have none of the prompt."""

    def update_from_output(self, output: Any) -> None:
        if output.new_logprobs is not None:
            self.logprobs.blocks.append(output.new_logprobs.logprob_token_ids.tobytes())


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
