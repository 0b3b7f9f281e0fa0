"""Running microbatches through the model under Megatron's schedules."""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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

from vime.algorithms.importance import WeightRule
from vime.algorithms.score_centering import CenteringTerms
from vime.backends.megatron_utils.config import TrainerConfig
from vime.backends.megatron_utils.head.types import HeadOptions, HeadTerms
from vime.backends.megatron_utils.logprob import response_log_probs
from vime.backends.megatron_utils.loss import StepLoss
from vime.backends.megatron_utils.model import training_device
from vime.backends.megatron_utils.packing import MicrobatchTensors, to_tensors
from vime.backends.megatron_utils.parallel import context_share, sum_over_context
from vime.backends.megatron_utils.recorded import check_recorded
from vime.backends.megatron_utils.routes import RoutingReplay, check_routes
from vime.data.batch import PackedMicrobatch
from vime.data.lazy import token_counts


@dataclass(frozen=True, kw_only=True)
class _HeadCall:
    """A microbatch and what the output head is to make of it."""

    microbatch: MicrobatchTensors
    with_entropy: bool
    rule: WeightRule | None
    """Of score centering; None without it."""
    replay_nucleus: bool = True
    replay_routes: bool = True


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
        self._replay = RoutingReplay(self._chunks, core_config) if config.replay_routes else None
        self._tensor_group = parallel_state.get_tensor_model_parallel_group()
        self._sequence_parallel = core_config.sequence_parallel
        self._multiple = args.tensor_model_parallel_size if core_config.sequence_parallel else 1
        self._share = context_share(args)
        self._sum_over_context = sum_over_context()
        self._hidden_size = args.hidden_size
        self._rule = config.objective.weight_rule if config.objective.centers_scores else None
        self._head = HeadOptions(args.vocab_size, config.temperature, config.fp32_lm_head, config.log_probs_chunk_size)

    def run(self, microbatches: Sequence[PackedMicrobatch], step_loss: StepLoss) -> None:
        """Forward and backward through all microbatches; gradients are summed over data-parallel ranks.

        Raises `TrainerError` at the microbatch that lacks what score centering needs of the sampler.
        """

        def step(data: Iterator[MicrobatchTensors], model: torch.nn.Module) -> tuple[Any, Any]:
            microbatch = next(data)

            def loss(terms: HeadTerms) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
                if terms.entropy is None:
                    raise TypeError("the loss needs entropies")
                return step_loss(microbatch, terms.log_prob, terms.entropy, _centering(terms))

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
    ) -> list[npt.NDArray[np.float32]]:
        """Log-probabilities and, `with_entropy`, entropies of each microbatch [1 or 2, R], on every rank.

        `replay_nucleus` keeps to the recorded nucleus where there is one; else they are over the whole vocabulary.
        `replay_routes` keeps to recorded experts, where they are replayed at all.
        """
        results: list[torch.Tensor] = []
        response_counts: list[int] = []

        def step(data: Iterator[MicrobatchTensors], model: torch.nn.Module) -> tuple[Any, Any]:
            microbatch = next(data)
            if model is self._chunks[0]:
                response_counts.append(len(microbatch.own))

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
                replay_routes=replay_routes,
            )
            return self._call(model, call), collect

        with torch.no_grad():
            self._schedule(step, microbatches, forward_only=True)
        return [array.cpu().numpy() for array in self._from_last_stage(results, 1 + with_entropy, response_counts)]

    def _from_last_stage(
        self, results: list[torch.Tensor], num_rows: int, response_counts: Sequence[int]
    ) -> list[torch.Tensor]:
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() == 1:
            return results
        if not results:
            results = [torch.empty(num_rows, count, device=self.device) for count in response_counts]
        for result in results:
            dist.broadcast(result, src=dist.get_global_rank(group, group.size() - 1), group=group)
        return results

    def _schedule(
        self,
        step: Any,
        microbatches: Sequence[PackedMicrobatch],
        checks: Sequence[Callable[[PackedMicrobatch], None]] = (),
        *,
        forward_only: bool,
    ) -> None:
        """Ask for each microbatch once, in order; hold one at a time, or those between the first and last chunk."""

        def read() -> Iterator[MicrobatchTensors]:
            for packed in microbatches:
                for check in checks:
                    check(packed)
                yield to_tensors(packed, self.device, self._share, self._multiple)

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
        if self._replay is not None:
            self._replay.clear()

    def _call(self, model: torch.nn.Module, call: _HeadCall) -> Any:
        microbatch = call.microbatch
        replay: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._replay is not None:
            replay = self._replay.forward(model, microbatch.routes if call.replay_routes else None)
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
        **_: Any,
    ) -> HeadTerms:
        """Megatron's hook in place of its own head: hidden states [T, 1, H] to the terms of the R response tokens."""
        if self._sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=self._tensor_group)
        else:
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=self._tensor_group)
        weight = output_layer.weight if output_weight is None else output_weight
        microbatch = context.microbatch
        return response_log_probs(
            hidden_states[:, 0].index_select(0, microbatch.response_rows),
            weight,
            microbatch.targets,
            self._head,
            self._tensor_group,
            with_entropy=context.with_entropy,
            candidates=microbatch.candidates if context.rule is not None and microbatch.nucleus is None else None,
            nucleus=microbatch.nucleus if context.replay_nucleus else None,
            rule=context.rule,
        )


def _centering(terms: HeadTerms) -> CenteringTerms | None:
    if terms.sc_correction is None or terms.sc_sampler_head_mass is None or terms.sc_train_head_mass is None:
        return None
    return CenteringTerms(terms.sc_correction, terms.sc_sampler_head_mass, terms.sc_train_head_mass)
