"""Recorded experts in place of the routers' own choice, and the recording of that choice, by Megatron's replay."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import Enum

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig

from vime.backends.megatron_utils.context import ContextShare, tokens_of_rank
from vime.backends.megatron_utils.route_part import RoutePart
from vime.backends.megatron_utils.routes import Routes
from vime.data.batch import RouteRows
from vime.errors import TrainerError


class Routing(Enum):
    """What routers do in a forward pass."""

    FREE = "free"
    """Choose."""
    REPLAY = "replay"
    """Take the microbatch's routes; choose where it has none."""
    RECORD = "record"
    """Choose, and keep what was chosen."""


class RoutingReplay:
    """The routers of each chunk of a model, which can be told what to choose and asked what they chose."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], config: TransformerConfig, share: ContextShare, rank_multiple: int
    ) -> None:
        """Take how packs are cut, and the multiple to which a rank's part is padded."""
        self._routers = {id(chunk): _routers_of(chunk) for chunk in chunks}
        self._keeps_for_recompute = config.recompute_granularity is not None
        group = parallel_state.get_tensor_model_parallel_group()
        self._tensor_group: dist.ProcessGroup | None = group if config.sequence_parallel else None
        self._recorded: dict[int, list[npt.NDArray[np.int32]]] = defaultdict(list)
        layers = tuple(sorted(layer for routers in self._routers.values() for layer in routers))
        everywhere = expert_layers(config)
        self.part = RoutePart(
            layers, tuple(map(everywhere.index, layers)), config.moe_router_topk, share, rank_multiple
        )
        RouterReplay.clear_global_router_replay_instances()

    @contextlib.contextmanager
    def forward(self, chunk: torch.nn.Module, routing: Routing, routes: Routes | None) -> Iterator[None]:
        """During a forward pass of `chunk` its routers do as `routing` says.

        Router calls after one with `routes` recompute activations; they get the same routes, first microbatch first.
        """
        routers = self._routers[id(chunk)]
        if routing is Routing.RECORD:
            with self._recording(routers):
                yield
        elif routing is Routing.REPLAY and routes is not None:
            with self._replaying(routers, routes):
                yield
        else:
            yield

    def clear(self) -> None:
        """Let all routers choose freely again."""
        for routers in self._routers.values():
            for router in routers.values():
                router.clear_indices()
                router.clear_router_replay_action()

    def take_recorded(self, lengths: Sequence[Sequence[int]]) -> list[RouteRows]:
        """What was recorded since the last call, for each microbatch: its sequences have `lengths` tokens."""
        recorded, self._recorded = self._recorded, defaultdict(list)
        return [self._rows(recorded, number, counts) for number, counts in enumerate(lengths)]

    def _rows(self, recorded: dict[int, list[npt.NDArray[np.int32]]], number: int, lengths: Sequence[int]) -> RouteRows:
        part = self.part
        tokens, rows = tokens_of_rank(lengths, part.share, part.rank_multiple)
        ids = np.empty((len(tokens), len(part.layers), part.top_k), np.uint16)
        for place, layer in enumerate(part.layers):
            ids[:, place] = recorded[layer][number][rows]
        narrow = ids.astype(np.uint8) if ids.max(initial=0) < 2**8 else ids
        return RouteRows(narrow, tokens, part.layers, np.ones(len(lengths), bool))

    @contextlib.contextmanager
    def _replaying(self, routers: dict[int, RouterReplay], routes: Routes) -> Iterator[None]:
        for layer, router in routers.items():
            self._tell(router, self._of_layer(routes, layer))
        try:
            yield
        finally:
            for router in routers.values():
                router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

    @contextlib.contextmanager
    def _recording(self, routers: dict[int, RouterReplay]) -> Iterator[None]:
        for router in routers.values():
            router.set_router_replay_action(RouterReplayAction.RECORD)
        yield
        for layer, router in routers.items():
            chosen = self._whole(router.get_recorded_indices())
            self._recorded[layer].append(chosen.to("cpu", torch.int32).numpy())
            router.clear_indices()
            router.clear_router_replay_action()

    def _tell(self, router: RouterReplay, ids: torch.Tensor) -> None:
        router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        if self._keeps_for_recompute:
            router.set_target_indices(ids)
        else:
            router.target_topk_idx = ids

    def _of_layer(self, routes: Routes, layer: int) -> torch.Tensor:
        """[T of this tensor-parallel rank, K] int64"""
        if layer not in routes.layers:
            raise TrainerError(f"routes of layers {list(routes.layers)} were read, needed: those of layer {layer} too.")
        ids = routes.ids[:, routes.layers.index(layer)]
        if self._tensor_group is not None:
            ids = ids.chunk(self._tensor_group.size())[self._tensor_group.rank()]
        return ids.long().to(torch.cuda.current_device(), non_blocking=True)

    def _whole(self, chosen: torch.Tensor) -> torch.Tensor:
        """Of all tensor-parallel ranks, which hold consecutive parts: [T, K]."""
        if self._tensor_group is None or self._tensor_group.size() == 1:
            return chosen
        parts = [torch.empty_like(chosen) for _ in range(self._tensor_group.size())]
        dist.all_gather(parts, chosen.contiguous(), group=self._tensor_group)
        return torch.cat(parts)


def expert_layers(config: TransformerConfig) -> tuple[int, ...]:
    """Numbers, from 0, of the layers of the whole model that have experts."""
    every = config.moe_layer_freq
    pattern = every if isinstance(every, list) else [int(layer % every == 0) for layer in range(config.num_layers)]
    return tuple(layer for layer, routed in enumerate(pattern) if routed) if config.num_moe_experts else ()


def _routers_of(chunk: torch.nn.Module) -> dict[int, RouterReplay]:
    """By number of the layer in the whole model, from 0; layers for further tokens choose freely."""
    routers = [module for module in chunk.modules() if isinstance(module, TopKRouter) and not module.is_mtp_layer]
    return {router.layer_number - 1: router.router_replay for router in routers if router.router_replay is not None}
