"""A sequence that an engine sampled to be compared with the trainer, and how the trainer reads it."""

from __future__ import annotations

import msgspec
import numpy as np

from vime.backends.megatron_utils.route_part import RoutePart
from vime.data.batch import NucleusRows, PackedMicrobatch, RouteRows


class ProbeSequence(msgspec.Struct, frozen=True):
    """One prompt and what an engine made of it."""

    tokens: list[int]
    response_length: int
    log_probs: list[float]
    """The sampler's, one for each response token."""
    cached: bool = False
    """Whether part of the prompt came from the prefix cache."""
    routes: list[list[list[int]]] | None = None
    """[T - 1, L, K], where the engine returns them."""
    nucleus: list[list[int]] | None = None
    """The tokens among which each response token was chosen, where the engine returns them."""


def pack_probe(sequence: ProbeSequence, part: RoutePart | None) -> PackedMicrobatch:
    """One sequence as the trainer reads it, with the routes of `part`."""
    length, response = len(sequence.tokens), sequence.response_length
    return PackedMicrobatch(
        tokens=np.array(sequence.tokens, np.int32),
        cu_seqlens=np.array([0, length], np.int32),
        response_lengths=np.array([response], np.int32),
        loss_mask=np.ones(response, np.uint8),
        sampler_log_probs=np.array(sequence.log_probs, np.float32),
        advantages=np.zeros(1, np.float32),
        mask_sums=np.full(1, response, np.float32),
        sample_indices=np.zeros(1, np.int64),
        nucleus=_nucleus(sequence.nucleus),
        routes=_routes(sequence, part),
    )


def _nucleus(rows: list[list[int]] | None) -> NucleusRows | None:
    if rows is None:
        return None
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return NucleusRows(np.array([token for row in rows for token in row], np.int32), offsets)


def _routes(sequence: ProbeSequence, part: RoutePart | None) -> RouteRows | None:
    if part is None or sequence.routes is None:
        return None
    tokens = part.tokens([len(sequence.tokens)])
    tokens = tokens[tokens < len(sequence.routes)]
    ids = np.array(sequence.routes, np.int32)[tokens][:, list(part.places)]
    return RouteRows(ids, tokens, part.layers, np.ones(1, bool))
