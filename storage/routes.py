"""Routes of a group as one column: layers first, so that one layer's rows of one member are one range of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vime.errors import SampleError

Array = npt.NDArray[Any]
ROUTE_DTYPES = {"uint8": 2**8, "uint16": 2**16}
"""dtype -> how many experts it can name."""


def route_dtype(routes: Sequence[Array], num_experts: int | None) -> str:
    """The smallest dtype for ids of `num_experts` experts; without a number, for the ids that are there.

    Raises `SampleError` when no dtype is wide enough or an id is negative.
    """
    present = [array for array in routes if array.size]
    greatest = max((int(array.max()) for array in present), default=0)
    if min((int(array.min()) for array in present), default=0) < 0:
        raise SampleError("rollout_routed_experts has negative expert ids.", reason="routes_id_range")
    needed = max(greatest + 1, num_experts or 0)
    for dtype, most in ROUTE_DTYPES.items():
        if needed <= most:
            return dtype
    raise SampleError(
        f"rollout_routed_experts has ids up to {greatest} of {num_experts} experts, allowed: up to 65536 experts.",
        reason="routes_id_range",
    )


def stack_layers_first(routes: Sequence[Array], dtype: npt.DTypeLike) -> Array:
    """Arrays [rows, L, K] of the members as one array [L, sum of rows, K]; L and K must be the same in all."""
    num_rows = sum(len(array) for array in routes)
    stacked = np.empty((routes[0].shape[1], num_rows, routes[0].shape[2]), dtype)
    start = 0
    for array in routes:
        stacked[:, start : start + len(array)] = array.transpose(1, 0, 2)
        start += len(array)
    return stacked


def rows_first(column: Array, start: int, stop: int) -> Array:
    """Rows `start:stop` of a column [L, rows, K] as a view [stop - start, L, K]."""
    return column[:, start:stop].transpose(1, 0, 2)
