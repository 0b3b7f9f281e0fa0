"""The scores of sampled tokens in vLLM's second model runner, on a GPU: a fourth of the time, and one copy to the host.

vLLM reads all logits five times: for their maximum, the sum, the token's rank, and for the most probable tokens. See
`score_kernels` for how they are read once. Log-probabilities differ from vLLM's own in the last bits of the sum.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

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


@dataclass(frozen=True)
class HostScores:
    """What `score` returned, on the host when the copy has arrived; vLLM asks it for nothing but lists."""

    found: torch.Tensor
    k: int
    first_rows: list[int] | None

    def tolists(self) -> LogprobsLists:
        """vLLM's `LogprobsLists`, of one memory."""
        found, width = self.found.numpy(), self.k + 1
        num_rows = len(found) // (2 * width + 1)
        rows = found[: num_rows * 2 * width].reshape(num_rows, 2 * width)
        log_probs = rows[:, width:].view(np.float32)
        return LogprobsLists(rows[:, :width], log_probs, found[num_rows * 2 * width :], self.first_rows)


class PackedScores(LogprobsTensors):  # type: ignore[misc]
    """Views of the one array that `score` returns, which travels to the host at once."""

    found: torch.Tensor

    @classmethod
    def of(
        cls, found: torch.Tensor, parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor], first_rows: list[int] | None
    ) -> PackedScores:
        """`parts` are the views of `found`."""
        scores = cls(*parts, first_rows)
        scores.found = found
        return scores

    def to_cpu_nonblocking(self) -> HostScores:
        k = self.logprob_token_ids.shape[1] - 1
        return HostScores(self.found.to("cpu", non_blocking=True), k, self.cu_num_generated_tokens)


def _scoring(stock: Callable[..., Any]) -> Callable[..., Any]:
    from triton import TritonError

    from vime.backends.vllm_utils.plugin.score_kernels import can_score, score, views

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
                found = score(logits, num_logprobs, sampled_token_ids)
                return PackedScores.of(found, views(found, num_logprobs), others[0])
            except TritonError as error:
                refused.append(str(error))
                _log.warning("This Triton doesn't compile vime's kernels; scores are vLLM's, and slower: %s", error)
        return stock(logits, num_logprobs, sampled_token_ids, *others, **named)

    setattr(compute_topk_scores, _MARK, True)
    return compute_topk_scores
