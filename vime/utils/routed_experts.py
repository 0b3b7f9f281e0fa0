"""Routes of one sample as one array, whatever pieces they came in."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from vime.errors import SampleError

Routes = npt.NDArray[Any]


def join_routes(routes: Any, where: str) -> Routes:
    """`Sample.rollout_routed_experts` as one array [rows, L, K] of integers; not copied when it is one already.

    Chunks are joined in their order. Raises `SampleError` naming `where` for anything else.
    """
    chunks = [np.asarray(chunk) for chunk in routes] if isinstance(routes, list) else [np.asarray(routes)]
    if not chunks:
        raise SampleError(
            f"{where}: rollout_routed_experts is an empty list, allowed: None or chunks.", reason="routes_missing"
        )
    for number, chunk in enumerate(chunks):
        if chunk.ndim != 3 or chunk.shape[1:] != chunks[0].shape[1:] or chunk.dtype.kind not in "iu":
            raise SampleError(
                f"{where}: chunk {number} of rollout_routed_experts is {chunk.dtype} {list(chunk.shape)}, "
                f"allowed: integers [rows, layers, top-k], the last two the same in each chunk.",
                reason="routes_shape",
            )
    return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)


def num_routed(routes: Any) -> int:
    """Number of tokens that have routes, from the first one on."""
    if routes is None:
        return 0
    return sum(map(len, routes)) if isinstance(routes, list) else len(routes)


def continue_routes(earlier: Any, rows: Any, start: int, num_rows: int, where: str) -> Routes:
    """Routes of a sample after an answer of the engine that covers `num_rows` rows from row `start` on.

    Rows that both have are taken from the answer. Raises `SampleError` when the answer has another number of rows, or
    `earlier` ends before `start`: a gap can't be filled later.
    """
    answer = join_routes(rows, where)
    if len(answer) != num_rows:
        raise SampleError(
            f"{where}: the answer has routes of {len(answer)} tokens, allowed: {num_rows} from row {start} on.",
            reason="routes_rows",
        )
    if start == 0:
        return answer
    known = None if earlier is None else join_routes(earlier, where)
    if known is None or len(known) < start:
        raise SampleError(
            f"{where}: the answer's routes begin at row {start}, but there are {0 if known is None else len(known)} "
            "rows before it; allowed: no gap.",
            next_step="Ask the engine for routes from the first missing row on.",
            reason="routes_gap",
        )
    return join_routes([known[:start], answer], where)
