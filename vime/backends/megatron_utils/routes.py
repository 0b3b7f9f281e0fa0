"""A rank's share of a microbatch's recorded routes, as its routers take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vime.backends.megatron_utils.context import Positions, find
from vime.data.batch import PackedMicrobatch, RouteRows, tokens_with_successor
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


def routes_of(microbatch: PackedMicrobatch, places: Positions, held: Positions) -> Routes | None:
    """Routes of the `held` places of the padded pack; None where the microbatch has none.

    `places` says where each of the microbatch's tokens is in that pack. Tokens without routes, whose outputs no loss
    depends on, take experts in turn, so that they load all alike.
    """
    rows = microbatch.routes
    if rows is None:
        return None
    with_next = tokens_with_successor(microbatch.cu_seqlens)
    own, at = find(places[rows.tokens], held)
    ids = _in_turn(rows, held)
    ids[at] = rows.ids[own]
    needed, _ = find(places[with_next], held)
    replayed = np.isin(rows.tokens[own], with_next, assume_unique=True)
    return Routes(torch.from_numpy(ids), rows.layers, int(replayed.sum()), int(needed.sum()))


def _in_turn(rows: RouteRows, held: Positions) -> npt.NDArray[np.integer[Any]]:
    """[T, L, K] different experts for each token, in the narrowest type that torch has for the recorded ones."""
    top_k = rows.ids.shape[2]
    num_experts = max(int(rows.ids.max(initial=0)) + 1, top_k)
    ids = held[:, None, None] * top_k + np.arange(top_k)
    dtype = np.uint8 if rows.ids.dtype == np.uint8 else np.int32
    return np.broadcast_to(ids % num_experts, (len(held), *rows.ids.shape[1:])).astype(dtype)


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
