"""The scores of sampled tokens in vLLM's second model runner, on a GPU: a fourth of the time, and one copy to the host.

vLLM reads all logits five times: for their maximum, the sum, the token's rank, and for the most probable tokens. See
`score_kernels` for how they are read once. Log-probabilities differ from vLLM's own in the last bits of the sum.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

_USERS = tuple(f"vllm.v1.worker.gpu.{name}" for name in ("sample.sampler", "spec_decode.rejection_sampler"))
"""Modules that take the function from its own by name; they may be loaded already."""
_MARK = "vime_faster"
_log = logging.getLogger(__name__)


def install() -> None:
    """Extend vLLM's sampler in this process, on a CUDA device; may be called more than once."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    from vllm.v1.worker.gpu.sample import logprob

    if not hasattr(logprob.compute_topk_scores, _MARK):
        scoring = _scoring(logprob.compute_topk_scores)
        for module in (logprob, *(sys.modules[name] for name in _USERS if name in sys.modules)):
            module.compute_topk_scores = scoring


def _scoring(stock: Callable[..., Any]) -> Callable[..., Any]:
    from triton import TritonError
    from vllm.v1.outputs import LogprobsTensors

    from vime.backends.vllm_utils.plugin.score_kernels import can_score, packed_rows, ranks, score

    class PackedScores(LogprobsTensors):  # type: ignore[misc]
        """Views of the one array that `score` returns, which travels to the host at once."""

        found: torch.Tensor

        @classmethod
        def of(cls, found: torch.Tensor, k: int, first_rows: list[int] | None) -> PackedScores:
            rows = packed_rows(found, k)
            scores = cls(rows[:, : k + 1], rows[:, k + 1 :].view(torch.float32), ranks(found, k), first_rows)
            scores.found = found
            return scores

        def to_cpu_nonblocking(self) -> PackedScores:
            k = self.logprob_token_ids.shape[1] - 1
            return self.of(self.found.to("cpu", non_blocking=True), k, self.cu_num_generated_tokens)

    refused: list[str] = []

    @functools.wraps(stock)
    def compute_topk_scores(
        logits: torch.Tensor, num_logprobs: int, sampled_token_ids: torch.Tensor, *others: Any, **named: Any
    ) -> Any:
        # Samplers pass the first row of each request, None where each has one row; scores of prompts are vLLM's.
        is_common = len(others) == 1 and not isinstance(others[0], torch.Tensor)
        is_common = is_common and not named.get("max_per_req_token_ids") and not named.get("logits_mode")
        if is_common and not refused and can_score(logits, num_logprobs):
            try:
                return PackedScores.of(score(logits, num_logprobs, sampled_token_ids), num_logprobs, others[0])
            except TritonError as error:
                refused.append(str(error))
                _log.warning("This Triton doesn't compile vime's kernels; scores are vLLM's, and slower: %s", error)
        return stock(logits, num_logprobs, sampled_token_ids, *others, **named)

    setattr(compute_topk_scores, _MARK, True)
    return compute_topk_scores
