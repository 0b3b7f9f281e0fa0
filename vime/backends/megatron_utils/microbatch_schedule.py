"""Megatron's schedules over packed microbatches that are read one after the other."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from vime.backends.megatron_utils.model import training_device
from vime.backends.megatron_utils.packing import MicrobatchTensors, to_tensors
from vime.backends.megatron_utils.parallel import context_share, sum_over_context
from vime.data.batch import PackedMicrobatch
from vime.data.lazy import token_counts


class MicrobatchSchedule:
    """Feeds this rank's share of packed microbatches to the chunks of one model."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], args: argparse.Namespace, core_config: TransformerConfig
    ) -> None:
        self.device = training_device()
        self._chunks = list(chunks)
        self.multiple = args.tensor_model_parallel_size if core_config.sequence_parallel else 1
        """Each rank's tokens are padded to a multiple of this."""
        self.share = context_share(args)
        """Which part of a pack the rank holds."""
        self._num_further = core_config.mtp_num_layers or 0
        self._sum_over_context = sum_over_context()

    def run(
        self,
        step: Any,
        microbatches: Sequence[PackedMicrobatch],
        checks: Sequence[Callable[[PackedMicrobatch], None]] = (),
        *,
        forward_only: bool,
    ) -> None:
        """Run Megatron's forward step function `step` on all microbatches; what `checks` raise comes out.

        Each microbatch is asked for once, in order; one is held at a time, or those between the first and last chunk.
        """

        num_further = 0 if forward_only else self._num_further

        def read() -> Iterator[MicrobatchTensors]:
            for packed in microbatches:
                for check in checks:
                    check(packed)
                yield to_tensors(packed, self.device, self.share, self.multiple, num_further)

        feeds = list(itertools.tee(read(), len(self._chunks)))
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=feeds if len(feeds) > 1 else feeds[0],
            model=self._chunks,
            num_microbatches=len(microbatches),
            seq_length=max(token_counts(microbatches)),
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def of_responses(
        self,
        forward: Callable[[torch.nn.Module, MicrobatchTensors], Any],
        microbatches: Sequence[PackedMicrobatch],
    ) -> list[npt.NDArray[np.float32]]:
        """What `forward` says of each response token without gradients, one array [R] per microbatch on every rank.

        On the last pipeline stage `forward` returns the values of this rank's own response tokens.
        """
        results: list[torch.Tensor] = []
        response_counts: list[int] = []

        def step(data: Iterator[MicrobatchTensors], model: torch.nn.Module) -> tuple[Any, Any]:
            microbatch = next(data)
            if model is self._chunks[0]:
                response_counts.append(len(microbatch.own))

            def collect(values: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
                whole = values.new_zeros(len(microbatch.own))
                whole[microbatch.own] = values
                results.append(self._sum_over_context(whole))
                return values.sum(), {}

            return forward(model, microbatch), collect

        with torch.no_grad():
            self.run(step, microbatches, forward_only=True)
        return [array.cpu().numpy() for array in self.from_last_stage(results, [(count,) for count in response_counts])]

    def from_last_stage(self, results: list[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """The float32 tensors of the last pipeline stage, one for each microbatch, on every stage."""
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() == 1:
            return results
        if not results:
            results = [torch.empty(shape, device=self.device) for shape in shapes]
        for result in results:
            dist.broadcast(result, src=dist.get_global_rank(group, group.size() - 1), group=group)
        return results
