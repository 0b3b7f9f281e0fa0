"""Running microbatches through the model under Megatron's schedules."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from vime.backends.megatron_utils.config import TrainerConfig
from vime.backends.megatron_utils.head.types import HeadOptions, HeadTerms
from vime.backends.megatron_utils.logprob import response_log_probs
from vime.backends.megatron_utils.loss import StepLoss
from vime.backends.megatron_utils.model import training_device
from vime.backends.megatron_utils.packing import MicrobatchTensors, to_tensors
from vime.data.batch import PackedMicrobatch


class ForwardPass:
    """Feeds packed microbatches to a model; on the last pipeline stage hidden states become log-probabilities."""

    def __init__(
        self, model: torch.nn.Module, args: argparse.Namespace, core_config: TransformerConfig, config: TrainerConfig
    ) -> None:
        self.device = training_device()
        self._model = model
        self._tensor_group = parallel_state.get_tensor_model_parallel_group()
        self._sequence_parallel = core_config.sequence_parallel
        self._multiple = args.tensor_model_parallel_size if core_config.sequence_parallel else 1
        self._hidden_size = args.hidden_size
        self._head = HeadOptions(args.vocab_size, config.temperature, config.fp32_lm_head, config.log_probs_chunk_size)

    def run(self, microbatches: Sequence[PackedMicrobatch], step_loss: StepLoss) -> None:
        """Forward and backward through all microbatches; gradients are summed over data-parallel ranks."""

        def step(data: Iterator[MicrobatchTensors], model: torch.nn.Module) -> tuple[Any, Any]:
            microbatch = next(data)

            def loss(output: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
                return step_loss(microbatch, *output)

            return self._call(model, microbatch), loss

        self._schedule(step, microbatches, forward_only=False)

    def log_probs(self, microbatches: Sequence[PackedMicrobatch]) -> list[npt.NDArray[np.float32]]:
        """Log-probabilities [R] of each microbatch, on every rank."""
        results: list[torch.Tensor] = []

        def step(data: Iterator[MicrobatchTensors], model: torch.nn.Module) -> tuple[Any, Any]:
            def collect(output: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
                results.append(output[0].detach())
                return output[0].sum(), {}

            return self._call(model, next(data)), collect

        with torch.no_grad():
            self._schedule(step, microbatches, forward_only=True)
        return [array.cpu().numpy() for array in self._from_last_stage(results, microbatches)]

    def _from_last_stage(
        self, results: list[torch.Tensor], microbatches: Sequence[PackedMicrobatch]
    ) -> list[torch.Tensor]:
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() == 1:
            return results
        if not results:
            results = [torch.empty(len(batch.loss_mask), device=self.device) for batch in microbatches]
        for result in results:
            dist.broadcast(result, src=dist.get_global_rank(group, group.size() - 1), group=group)
        return results

    def _schedule(self, step: Any, microbatches: Sequence[PackedMicrobatch], *, forward_only: bool) -> None:
        longest = max(batch.num_tokens for batch in microbatches)
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=(to_tensors(batch, self.device, self._multiple) for batch in microbatches),
            model=[self._model],
            num_microbatches=len(microbatches),
            seq_length=longest,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _call(self, model: torch.nn.Module, microbatch: MicrobatchTensors) -> Any:
        return model(
            microbatch.tokens,
            microbatch.position_ids,
            None,
            packed_seq_params=microbatch.packed,
            output_processor=self._to_log_probs,
            output_processor_context=microbatch,
        )

    def _to_log_probs(
        self,
        *,
        hidden_states: torch.Tensor,
        output_layer: Any,
        output_weight: torch.Tensor | None,
        context: MicrobatchTensors,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Megatron's hook in place of its own head: hidden states [T, 1, H] -> (log-probs [R], entropies [R])."""
        if self._sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=self._tensor_group)
        else:
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=self._tensor_group)
        weight = output_layer.weight if output_weight is None else output_weight
        rows = hidden_states[:, 0].index_select(0, context.response_rows)
        return response_log_probs(rows, weight, context.targets, self._head, self._tensor_group)
