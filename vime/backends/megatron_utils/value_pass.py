"""Running microbatches through a value model under Megatron's schedules."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from vime.algorithms.value_objective import ValueTokens, value_objective
from vime.backends.megatron_utils.microbatch_schedule import MicrobatchSchedule
from vime.backends.megatron_utils.packing import MicrobatchTensors
from vime.backends.megatron_utils.value_head import ValueHead
from vime.data.batch import PackedMicrobatch, StepTotals
from vime.errors import TrainerError


@dataclass
class ValueLoss:
    """Loss of the microbatches of one step on one rank, and what is reported about it.

    `backward_scale` undoes the averages that Megatron takes over microbatches and data-parallel ranks; see `StepLoss`.
    """

    totals: StepTotals
    value_clip: float
    per_token: bool
    backward_scale: float
    metrics: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """Scalars by name of each microbatch, in order."""
    sample_indices: list[tuple[int, ...]] = field(default_factory=list)
    """Samples of each microbatch, in order."""

    def __call__(self, microbatch: MicrobatchTensors, values: torch.Tensor) -> torch.Tensor:
        """The loss for the schedule, for values [R]."""
        loss, metrics = value_objective(
            values, _value_tokens(microbatch), self.totals, value_clip=self.value_clip, per_token=self.per_token
        )
        self.metrics.append(metrics)
        self.sample_indices.append(microbatch.sample_indices)
        return loss * self.backward_scale


class ValuePass:
    """Feeds packed microbatches to a value model; on the last pipeline stage hidden states become values."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], args: argparse.Namespace, core_config: TransformerConfig
    ) -> None:
        self._schedule = MicrobatchSchedule(chunks, args, core_config)

    def values(self, microbatches: Sequence[PackedMicrobatch]) -> list[npt.NDArray[np.float32]]:
        """Value of the state before each response token, one array [R] per microbatch, on every rank."""
        return self._schedule.of_responses(_call, microbatches)

    def run(self, microbatches: Sequence[PackedMicrobatch], loss: ValueLoss) -> None:
        """Forward and backward through all microbatches; gradients are summed over data-parallel ranks."""

        def step(data: Iterator[MicrobatchTensors], model: torch.nn.Module) -> tuple[Any, Any]:
            microbatch = next(data)

            def reduce(values: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
                return loss(microbatch, values), {}

            return _call(model, microbatch), reduce

        self._schedule.run(step, microbatches, forward_only=False)


def _call(model: torch.nn.Module, microbatch: MicrobatchTensors) -> Any:
    return model(
        microbatch.tokens,
        microbatch.position_ids,
        None,
        packed_seq_params=microbatch.packed,
        output_processor=_to_values,
        output_processor_context=microbatch,
    )


def _to_values(
    *, hidden_states: torch.Tensor, output_layer: ValueHead, context: MicrobatchTensors, **_: Any
) -> torch.Tensor:
    """Megatron's hook in place of its own head: hidden states [T, 1, H] to the values of the R response tokens."""
    return output_layer.of_rows(hidden_states, context.response_rows)


def _value_tokens(microbatch: MicrobatchTensors) -> ValueTokens:
    if microbatch.values is None or microbatch.returns is None:
        raise TrainerError(f"samples {list(microbatch.sample_indices)} have no old values or no returns to learn.")
    return ValueTokens(
        microbatch.loss_mask,
        microbatch.response_lengths,
        microbatch.mask_sums,
        microbatch.values,
        microbatch.returns,
    )
