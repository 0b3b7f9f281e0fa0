"""What vLLM tells of the speculative decoding of one request."""

from __future__ import annotations

from typing import Any

from vime.backends.vllm_utils.wire_columns import DraftCounts


def draft_counts(output: Any) -> DraftCounts | None:
    """Of vLLM's `CompletionOutput`: None until its end, without speculative decoding, and from a vLLM before 0.32."""
    metrics = vars(output).get("spec_decode_metrics")
    if metrics is None:
        return None
    steps_by_accepted: list[int] = metrics.histogram
    num_accepted = sum(number * steps for number, steps in enumerate(steps_by_accepted))
    return DraftCounts(metrics.num_draft_tokens, num_accepted, sum(steps_by_accepted))
