"""Routes of running requests, where vime captures them itself: rows by request, and those of full cache blocks.

A prompt whose beginning is found in the prefix cache is not computed again, so its first routes are those that were
captured when the cached blocks were filled. They are kept by block, and live as long as the block's keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Blocks = Callable[[], list[int]]
"""Ids of a request's cache blocks; asked for only when a block is filled or found in the cache."""


class BlockRoutes:
    """Rows [L, K] of every token that a running request has computed, from its first token on."""

    def __init__(self, block_size: int) -> None:
        """`block_size` is the number of tokens of a cache block."""
        self._block_size = block_size
        self._by_block: dict[int, npt.NDArray[Any]] = {}
        self._by_request: dict[str, _RequestRoutes] = {}

    def add(self, request_id: str, start: int, rows: npt.NDArray[Any], blocks: Blocks) -> None:
        """`rows` [n, L, K] of a request's tokens from `start` on, computed in this step.

        Tokens that a preempted request computes again keep the routes under which they were first used.
        """
        routes = self._by_request.get(request_id)
        if routes is None:
            routes = self._by_request[request_id] = _RequestRoutes(rows)
        size, end = self._block_size, start + len(rows)
        if routes.num_rows < start:
            ids = blocks()
            for number in range(routes.num_rows // size, start // size):
                routes.append(self._by_block[ids[number]])
        routes.append(rows[routes.num_rows - start :])
        if start // size != end // size:
            ids = blocks()
            for number in range(start // size, end // size):
                self._by_block[ids[number]] = routes.rows(number * size, (number + 1) * size)

    def take(self, request_id: str, start: int) -> npt.NDArray[Any] | None:
        """Rows from `start` on that have not been taken yet; None when there is none."""
        routes = self._by_request.get(request_id)
        return None if routes is None else routes.take(start)

    def keep_only(self, request_ids: Any) -> None:
        """Forget requests that are not in this container."""
        for request_id in [known for known in self._by_request if known not in request_ids]:
            del self._by_request[request_id]


class _RequestRoutes:
    """Rows of one request in one growing buffer."""

    def __init__(self, like: npt.NDArray[Any]) -> None:
        self._dtype, self._shape = like.dtype, like.shape[1:]
        self._row_bytes = int(like[0].nbytes)
        self._data = bytearray()
        self._taken = 0

    @property
    def num_rows(self) -> int:
        return len(self._data) // self._row_bytes

    def append(self, rows: npt.NDArray[Any]) -> None:
        self._data += rows.tobytes()

    def rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        data = bytes(self._data[start * self._row_bytes : stop * self._row_bytes])
        return np.frombuffer(data, self._dtype).reshape(-1, *self._shape)

    def take(self, start: int) -> npt.NDArray[Any] | None:
        first, self._taken = max(start, self._taken), max(start, self.num_rows)
        return self.rows(first, self.num_rows) if first < self.num_rows else None
