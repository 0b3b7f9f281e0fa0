"""Functions of the user see whole responses, also where each rank of context parallelism has parts of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from vime.algorithms.objective_config import ObjectiveConfig, ReducerFactory, Weighting
from vime.algorithms.ragged import Reduce, on_one_rank, pieces

if TYPE_CHECKING:  # it loads Megatron, which users of the importance weights don't need
    from vime.backends.megatron_utils.packing import MicrobatchTensors


def with_whole_responses(config: ObjectiveConfig, microbatch: MicrobatchTensors, reduce: Reduce) -> ObjectiveConfig:
    """`config` whose weighting and reducer are called with the whole responses of `microbatch` on every rank.

    `reduce` sums over the ranks that hold parts of the same sequences; the result is `config` itself on one rank.
    """
    if reduce is on_one_rank or (config.weighting is None and config.reducer is None):
        return config
    responses = _Responses(microbatch, reduce)
    return dataclasses.replace(
        config,
        weighting=None if config.weighting is None else responses.weighting(config.weighting),
        reducer=None if config.reducer is None else responses.reducer(config.reducer),
    )


class _Responses:
    def __init__(self, microbatch: MicrobatchTensors, reduce: Reduce) -> None:
        self._own, self._reduce = microbatch.own, reduce
        self._lengths: list[int] = microbatch.whole_response_lengths.tolist()

    def _whole(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's tokens of each response to all tokens of each, differentiable."""
        part = torch.cat(list(parts))
        return pieces(self._reduce(part.new_zeros(len(self._own)).index_put((self._own,), part)), self._lengths)

    def _part(self, values: torch.Tensor) -> torch.Tensor:
        """This rank's tokens; values of a wrong shape are left to the check that names them."""
        return values[self._own] if values.shape == self._own.shape else values

    def weighting(self, function: Weighting) -> Weighting:
        def weigh(**given: Any) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
            whole = {name: self._whole(given[name]) for name in ("train_log_probs", "rollout_log_probs", "loss_masks")}
            pg_loss = torch.cat(self._whole([given["pg_loss"]]))
            weighted, masks, metrics = function(
                **{**given, **whole, "pg_loss": pg_loss, "response_lengths": self._lengths}
            )
            mask = self._part(torch.cat(list(masks)))
            return self._part(weighted), [mask], {name: self._part(values) for name, values in metrics.items()}

        return weigh

    def reducer(self, function: ReducerFactory) -> ReducerFactory:
        """Every rank comes to the same number, so each counts for its share of it."""

        def make(
            total_lengths: list[int], _: list[int], masks: list[torch.Tensor], per_token: bool
        ) -> Callable[[torch.Tensor], torch.Tensor]:
            reduce_whole = function(total_lengths, self._lengths, self._whole(masks), per_token)
            num_ranks = self._reduce(torch.ones((), device=self._own.device))
            return lambda term: reduce_whole(torch.cat(self._whole([term]))) / num_ranks

        return make
