"""What one rank's optimizer step made of each token, kept on the device until the step is taken."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from vime.algorithms.ragged import Reduce, on_one_rank, sequence_sums
from vime.data.trained_tokens import TrainedTokens

if TYPE_CHECKING:  # it loads Megatron, which users of the importance weights don't need
    from vime.backends.megatron_utils.packing import MicrobatchTensors


class TokenRecord:
    """Fills with the microbatches of a step; whole responses on every rank that holds parts of them."""

    def __init__(self, sum_over_context: Reduce) -> None:
        """`sum_over_context` sums over the ranks that hold parts of the same sequences."""
        self._reduce = sum_over_context
        self._samples: list[int] = []
        self._lengths: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        """[2, R] log-probabilities and advantages, of each microbatch."""
        self._gaps: list[torch.Tensor] = []
        """[S], of each microbatch."""

    def add(self, microbatch: MicrobatchTensors, log_probs: torch.Tensor) -> None:
        """Note a microbatch with its log-probabilities [R] under the current weights."""
        mask, lengths = microbatch.loss_mask, microbatch.response_lengths
        values = torch.stack([log_probs.detach().float(), microbatch.advantages])
        gaps = (microbatch.sampler_log_probs - values[0]).abs().where(mask, 0.0)
        sums = torch.stack([sequence_sums(gaps, lengths), sequence_sums(mask.to(gaps.dtype), lengths)])
        if self._reduce is not on_one_rank:
            whole = values.new_zeros(2, len(microbatch.own))
            whole[:, microbatch.own] = values
            values, sums, lengths = self._reduce(whole), self._reduce(sums), microbatch.whole_response_lengths
        self._samples += microbatch.sample_indices
        self._lengths.append(lengths)
        self._values.append(values)
        self._gaps.append(sums[0] / sums[1])

    def by_sample(self) -> dict[int, TrainedTokens]:
        """`Sample.index` -> its tokens, of the samples with a trained token: others only fill a microbatch."""
        if not self._samples:
            return {}
        values = torch.cat(self._values, dim=1).cpu()
        parts = torch.split(values, torch.cat(self._lengths).tolist(), dim=1)
        gaps: list[float] = torch.cat(self._gaps).tolist()
        return {
            sample: TrainedTokens(log_probs=part[0].numpy(), advantages=part[1].numpy(), mean_gap=gap)
            for sample, part, gap in zip(self._samples, parts, gaps, strict=True)
            if not math.isnan(gap)
        }
