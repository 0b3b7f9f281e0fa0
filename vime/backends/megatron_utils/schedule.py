"""Running microbatches through the model under Megatron's schedules."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from vime.algorithms.importance import WeightRule
from vime.algorithms.score_centering import CenteringTerms
from vime.backends.megatron_utils.config import TrainerConfig
from vime.backends.megatron_utils.further_targets import FurtherTargets
from vime.backends.megatron_utils.head.types import HeadOptions, HeadTerms
from vime.backends.megatron_utils.logprob import response_log_probs
from vime.backends.megatron_utils.loss import StepLoss
from vime.backends.megatron_utils.microbatch_schedule import MicrobatchSchedule
from vime.backends.megatron_utils.model import training_device
from vime.backends.megatron_utils.packing import MicrobatchTensors
from vime.backends.megatron_utils.parallel import sum_over_context
from vime.backends.megatron_utils.recorded import check_recorded
from vime.backends.megatron_utils.route_part import RoutePart
from vime.backends.megatron_utils.routes import check_routes
from vime.backends.megatron_utils.routing_replay import Routing, RoutingReplay
from vime.data.batch import PackedMicrobatch, RouteRows
from vime.errors import TrainerError


@dataclass(frozen=True, kw_only=True)
class _HeadCall:
    """A microbatch and what the output head is to make of it."""

    microbatch: MicrobatchTensors
    with_entropy: bool
    rule: WeightRule | None
    """Of score centering; None without it."""
    replay_nucleus: bool = True
    routing: Routing = Routing.REPLAY
    head: HeadOptions | None = None
    """Other than that of the settings."""


class ForwardPass:
    """Feeds packed microbatches to a model; on the last pipeline stage hidden states become log-probabilities."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        args: argparse.Namespace,
        core_config: TransformerConfig,
        config: TrainerConfig,
    ) -> None:
        self.device = training_device()
        self._chunks = list(chunks)
        self._runner = MicrobatchSchedule(chunks, args, core_config)
        self._replay: RoutingReplay | None = None
        if config.replay_routes:
            self._replay = RoutingReplay(self._chunks, core_config, self._runner.share, self._runner.multiple)
        self._tensor_group = parallel_state.get_tensor_model_parallel_group()
        self._sequence_parallel = core_config.sequence_parallel
        self._sum_over_context = sum_over_context()
        self._detaches_head = core_config.mtp_detach_heads
        self._rule = config.objective.weight_rule if config.objective.centers_scores else None
        self.head = HeadOptions(args.vocab_size, config.temperature, config.fp32_lm_head, config.log_probs_chunk_size)

    def run(self, microbatches: Sequence[PackedMicrobatch], step_loss: StepLoss) -> None:
        """Forward and backward through all microbatches; gradients are summed over data-parallel ranks.

        Raises `TrainerError` at the microbatch that lacks what score centering needs of the sampler.
        """

        def step(data: Iterator[MicrobatchTensors], model: torch.nn.Module) -> tuple[Any, Any]:
            microbatch = next(data)

            def loss(terms: HeadTerms) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
                if terms.entropy is None:
                    raise TypeError("the loss needs entropies")
                return step_loss(microbatch, terms.log_prob, terms.entropy, _centering(terms), terms.further)

            return self._call(model, _HeadCall(microbatch=microbatch, with_entropy=True, rule=self._rule)), loss

        checks = [] if self._rule is None else [check_recorded]
        if self._replay is not None:
            checks.append(check_routes)
        self._schedule(step, microbatches, checks, forward_only=False)

    def scores(
        self,
        microbatches: Sequence[PackedMicrobatch],
        *,
        replay_nucleus: bool = True,
        replay_routes: bool = True,
        with_entropy: bool = False,
        head: HeadOptions | None = None,
    ) -> list[npt.NDArray[np.float32]]:
        """Log-probabilities and, `with_entropy`, entropies of each microbatch [1 or 2, R], on every rank.

        `replay_nucleus` keeps to the recorded nucleus where there is one; else they are over the whole vocabulary.
        `replay_routes` keeps to recorded experts, where they are replayed at all. `head` takes the place of the
        settings' own.
        """
        routing = Routing.REPLAY if replay_routes else Routing.FREE
        return self._scored(
            microbatches, replay_nucleus=replay_nucleus, routing=routing, with_entropy=with_entropy, head=head
        )[0]

    def scores_and_routes(
        self, microbatches: Sequence[PackedMicrobatch], *, with_entropy: bool = False
    ) -> tuple[list[npt.NDArray[np.float32]], list[RouteRows]]:
        """As `scores`, and for each microbatch the experts that this rank's routers chose for its own tokens.

        Raises `TrainerError` where routes are not replayed at all.
        """
        if self._replay is None:
            raise TrainerError("routes can be recorded only where they are replayed.")
        found, lengths = self._scored(microbatches, routing=Routing.RECORD, with_entropy=with_entropy)
        return found, self._replay.take_recorded(lengths)

    @property
    def route_part(self) -> RoutePart | None:
        """Which routes this rank replays; None where none are."""
        return None if self._replay is None else self._replay.part

    def _scored(
        self,
        microbatches: Sequence[PackedMicrobatch],
        *,
        replay_nucleus: bool = True,
        routing: Routing,
        with_entropy: bool,
        head: HeadOptions | None = None,
    ) -> tuple[list[npt.NDArray[np.float32]], list[list[int]]]:
        """(scores of each microbatch, lengths of its sequences)."""
        results: list[torch.Tensor] = []
        response_counts: list[int] = []
        lengths: list[list[int]] = []

        def step(data: Iterator[MicrobatchTensors], model: torch.nn.Module) -> tuple[Any, Any]:
            microbatch = next(data)
            if model is self._chunks[0]:
                response_counts.append(len(microbatch.own))
                lengths.append(microbatch.total_lengths.tolist())

            def collect(terms: HeadTerms) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
                rows = [terms.log_prob] if terms.entropy is None else [terms.log_prob, terms.entropy]
                whole = terms.log_prob.new_zeros(len(rows), len(microbatch.own))
                whole[:, microbatch.own] = torch.stack(rows)
                results.append(self._sum_over_context(whole))
                return terms.log_prob.sum(), {}

            call = _HeadCall(
                microbatch=microbatch,
                with_entropy=with_entropy,
                rule=None,
                replay_nucleus=replay_nucleus,
                routing=routing,
                head=head,
            )
            return self._call(model, call), collect

        with torch.no_grad():
            self._schedule(step, microbatches, forward_only=True)
        shapes = [(1 + with_entropy, count) for count in response_counts]
        return [array.cpu().numpy() for array in self._runner.from_last_stage(results, shapes)], lengths

    def _schedule(
        self,
        step: Any,
        microbatches: Sequence[PackedMicrobatch],
        checks: Sequence[Callable[[PackedMicrobatch], None]] = (),
        *,
        forward_only: bool,
    ) -> None:
        self._runner.run(step, microbatches, checks, forward_only=forward_only)
        if self._replay is not None:
            self._replay.clear()

    def _call(self, model: torch.nn.Module, call: _HeadCall) -> Any:
        microbatch = call.microbatch
        replay: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._replay is not None:
            replay = self._replay.forward(model, call.routing, microbatch.routes)
        with replay:
            return model(
                microbatch.tokens,
                microbatch.position_ids,
                None,
                packed_seq_params=microbatch.packed,
                output_processor=self._to_log_probs,
                output_processor_context=call,
            )

    def _to_log_probs(
        self,
        *,
        hidden_states: torch.Tensor,
        output_layer: Any,
        output_weight: torch.Tensor | None,
        context: _HeadCall,
        further: Sequence[torch.Tensor] = (),
        **_: Any,
    ) -> HeadTerms:
        """Megatron's hook in place of its own head: hidden states [T, 1, H] to the terms of the R response tokens.

        `further` are those of each depth of the prediction of further tokens.
        """
        weight = output_layer.weight if output_weight is None else output_weight
        microbatch, head = context.microbatch, context.head or self.head
        hidden_states = self._of_all_tokens(hidden_states)
        further_log_probs = tuple(
            self._further_log_probs(states, weight, targets)
            for states, targets in zip(further, microbatch.further, strict=True)
        )
        if head.bf16:
            hidden_states, weight = hidden_states.bfloat16(), weight.bfloat16()
        terms = response_log_probs(
            hidden_states[:, 0].index_select(0, microbatch.response_rows),
            weight,
            microbatch.targets,
            head,
            self._tensor_group,
            with_entropy=context.with_entropy,
            candidates=microbatch.candidates if context.rule is not None and microbatch.nucleus is None else None,
            nucleus=microbatch.nucleus if context.replay_nucleus else None,
            rule=context.rule,
        )
        return dataclasses.replace(terms, further=further_log_probs)

    def _of_all_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[T, 1, H] whole on each rank of tensor parallelism, which has a part of the vocabulary."""
        if self._sequence_parallel:
            gathered: torch.Tensor = gather_from_sequence_parallel_region(hidden_states, group=self._tensor_group)
            return gathered
        copied: torch.Tensor = copy_to_tensor_model_parallel_region(hidden_states, group=self._tensor_group)
        return copied

    def _further_log_probs(
        self, hidden_states: torch.Tensor, weight: torch.Tensor, further: FurtherTargets
    ) -> torch.Tensor:
        """[N], over the whole vocabulary at temperature 1."""
        head = dataclasses.replace(self.head, temperature=1.0)
        rows = self._of_all_tokens(hidden_states)[:, 0].index_select(0, further.rows)
        shared = weight.detach() if self._detaches_head else weight
        return response_log_probs(rows, shared, further.targets, head, self._tensor_group, with_entropy=False).log_prob


def _centering(terms: HeadTerms) -> CenteringTerms | None:
    if terms.sc_correction is None or terms.sc_sampler_head_mass is None or terms.sc_train_head_mass is None:
        return None
    return CenteringTerms(terms.sc_correction, terms.sc_sampler_head_mass, terms.sc_train_head_mass)
