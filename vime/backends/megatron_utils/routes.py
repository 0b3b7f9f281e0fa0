"""The sampler's experts in place of the router's own choice (R3), through Megatron's router replay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig

from vime.backends.megatron_utils.context import Positions
from vime.data.batch import PackedMicrobatch, RouteRows
from vime.errors import TrainerError


@dataclass(frozen=True)
class Routes:
    """Experts of this rank's T tokens before they are shared out over tensor-parallel ranks."""

    ids: torch.Tensor
    """[T, L, K] on the CPU"""
    layers: tuple[int, ...]
    num_replayed: int
    """Tokens of the rank that have recorded routes."""
    num_needed: int
    """Tokens of the rank that could have: all but padding and the last of each sequence."""


def routes_of(microbatch: PackedMicrobatch, places: Positions, held: Positions, num_tokens: int) -> Routes | None:
    """Routes of the `held` places of the padded pack of `num_tokens`; None where the microbatch has none.

    `places` says where each of the microbatch's tokens is in that pack. Tokens without routes, whose outputs no loss
    depends on, take experts in turn, so that they load all alike.
    """
    rows = microbatch.routes
    if rows is None:
        return None
    lengths = np.diff(microbatch.cu_seqlens)
    has_next = np.ones(microbatch.num_tokens, bool)
    has_next[microbatch.cu_seqlens[1:][lengths > 0] - 1] = False
    recorded = np.repeat(rows.recorded, lengths)[has_next]
    filled = _in_turn(rows, num_tokens)
    filled[places[has_next][recorded]] = rows.ids[recorded]
    needed, replayed = np.zeros(num_tokens, bool), np.zeros(num_tokens, bool)
    needed[places[has_next]], replayed[places[has_next]] = True, recorded
    return Routes(torch.from_numpy(filled[held]), rows.layers, int(replayed[held].sum()), int(needed[held].sum()))


def _in_turn(rows: RouteRows, num_tokens: int) -> npt.NDArray[np.int32]:
    """[num_tokens, L, K] different experts for each token."""
    top_k = rows.ids.shape[2]
    num_experts = max(int(rows.ids.max(initial=0)) + 1, top_k)
    ids = np.arange(num_tokens)[:, None, None] * top_k + np.arange(top_k)
    return np.broadcast_to(ids % num_experts, (num_tokens, *rows.ids.shape[1:])).astype(np.int32)


def check_routes(microbatch: PackedMicrobatch) -> None:
    """Raise `TrainerError` where a sequence with trained tokens has no recorded routes."""
    sequence = np.repeat(np.arange(microbatch.num_sequences), microbatch.response_lengths)
    trained = np.bincount(sequence, microbatch.loss_mask, microbatch.num_sequences) > 0
    missing = trained if microbatch.routes is None else trained & ~microbatch.routes.recorded
    if missing.any():
        samples = ", ".join(str(index) for index in microbatch.sample_indices[missing].tolist())
        raise TrainerError(
            f"samples {samples} have no routes to replay, allowed: routes for every sample with trained tokens.",
            next_step="Generate them with --use-rollout-routing-replay, or train without it.",
        )


class RoutingReplay:
    """The routers of each chunk of a model, which can be told what to choose."""

    def __init__(self, chunks: Sequence[torch.nn.Module], config: TransformerConfig) -> None:
        self._routers = {id(chunk): _routers_of(chunk) for chunk in chunks}
        self._keeps_for_recompute = config.recompute_granularity is not None
        group = parallel_state.get_tensor_model_parallel_group()
        self._tensor_group: dist.ProcessGroup | None = group if config.sequence_parallel else None
        RouterReplay.clear_global_router_replay_instances()

    @contextlib.contextmanager
    def forward(self, chunk: torch.nn.Module, routes: Routes | None) -> Iterator[None]:
        """During a forward pass of `chunk` its routers choose `routes`; None lets them choose freely.

        Router calls afterwards recompute activations; they get the same routes, first microbatch first.
        """
        routers = self._routers[id(chunk)] if routes is not None else {}
        for layer, router in routers.items():
            self._tell(router, self._of_layer(routes, layer))
        try:
            yield
        finally:
            for router in routers.values():
                router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

    def clear(self) -> None:
        """Let all routers choose freely again."""
        for routers in self._routers.values():
            for router in routers.values():
                router.clear_indices()
                router.clear_router_replay_action()

    def _tell(self, router: RouterReplay, ids: torch.Tensor) -> None:
        router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        if self._keeps_for_recompute:
            router.set_target_indices(ids)
        else:
            router.target_topk_idx = ids

    def _of_layer(self, routes: Routes | None, layer: int) -> torch.Tensor:
        """[T of this tensor-parallel rank, K] int64"""
        if routes is None or layer not in routes.layers:
            found = () if routes is None else routes.layers
            raise TrainerError(f"routes of layers {list(found)} were read, needed: those of layer {layer} too.")
        ids = routes.ids[:, routes.layers.index(layer)]
        if self._tensor_group is not None:
            ids = ids.chunk(self._tensor_group.size())[self._tensor_group.rank()]
        return ids.long().to(torch.cuda.current_device(), non_blocking=True)


def _routers_of(chunk: torch.nn.Module) -> dict[int, RouterReplay]:
    """By number of the layer in the whole model, from 0."""
    routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
    return {router.layer_number - 1: router.router_replay for router in routers if router.router_replay is not None}
