"""Routes must be complete: a row for each token but the last, and in each row as many experts as the router chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.column_rows import place
from vime.errors import SampleError
from vime.utils.routed_experts import join_routes
from vime.utils.types import Sample

CHUNK_ROWS = 1 << 15
"""Rows compared at once; their copy stays in the processor's cache."""


@dataclass(frozen=True)
class RouteShape:
    """Shape of the routes of one token."""

    num_layers: int
    top_k: int
    num_experts: int


def check_routes(sample: Sample, shape: RouteShape) -> None:
    """Raise `SampleError` unless the routes are integers [T - 1, L, K] below the number of experts, no expert twice in
    a row, and not zeros, which is what an engine that lost them leaves."""
    if sample.rollout_routed_experts is None:
        raise SampleError(
            f"{place(sample)}: there are no rollout_routed_experts, which routing replay needs.",
            next_step="Check that the engine was started with routed experts, and that it returns them.",
            reason="routes_missing",
        )
    routes = join_routes(sample.rollout_routed_experts, place(sample))
    if routes.shape[1:] != (shape.num_layers, shape.top_k):
        raise SampleError(
            f"{place(sample)}: routes have {routes.shape[1]} layers and {routes.shape[2]} experts a token, allowed: "
            f"{shape.num_layers} and {shape.top_k}.",
            reason="routes_shape",
        )
    if len(routes) != len(sample.tokens) - 1:
        raise SampleError(
            f"{place(sample)}: routes have {len(routes)} rows, allowed: {len(sample.tokens) - 1}, one for each of "
            f"{len(sample.tokens)} tokens but the last.",
            next_step="A preempted request or a continuation without its first part can lose rows.",
            reason="routes_rows",
        )
    least, greatest = int(routes.min()), int(routes.max())
    if least < 0 or greatest >= shape.num_experts:
        raise SampleError(
            f"{place(sample)}: expert ids run from {least} to {greatest}, allowed: 0 to {shape.num_experts - 1}.",
            reason="routes_id_range",
        )
    if greatest == 0 and shape.num_experts > 1:
        raise SampleError(f"{place(sample)}: all routes are zero.", reason="routes_all_zero")
    _refuse_repeats(sample, routes)


def _refuse_repeats(sample: Sample, routes: npt.NDArray[Any]) -> None:
    num_layers, top_k = routes.shape[1:]
    flat = routes.reshape(-1, top_k)
    for start in range(0, len(flat), CHUNK_ROWS):
        repeats = _repeats(flat[start : start + CHUNK_ROWS])
        if repeats.any():
            row, layer = divmod(start + int(np.argmax(repeats)), num_layers)
            found = routes[row, layer].tolist()
            raise SampleError(
                f"{place(sample)}: the routes of token {row} in layer {layer} are {found}, allowed: {top_k} different "
                "experts.",
                reason="routes_repeated" if any(found) else "routes_all_zero",
            )


def _repeats(rows: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """For each row [K], whether a value occurs twice. All pairs are compared: faster than sorting for a dozen experts,
    because whole columns are compared at once."""
    columns = np.ascontiguousarray(rows.T)
    repeats = np.zeros(len(rows), bool)
    for first in range(len(columns) - 1):
        repeats |= (columns[first + 1 :] == columns[first]).any(axis=0)
    return repeats
