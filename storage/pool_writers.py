"""Several writers of one pool, so that a transaction is hashed while another waits for its syncs."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import straw

from storage.pool_writer import PoolWriter
from storage.refs import PoolRef

MAX_AT_ONCE = 2
"""Transactions at once. Each writer has a pack of its own, and the newest pack of a writer is not reclaimed."""


class PoolWriters:
    """Thread-safe; up to `MAX_AT_ONCE` publications run side by side, and more follow.

    Publications that follow one another go through the same writer; the second begins with the first two at once.
    """

    def __init__(
        self,
        open_store: Callable[[], AbstractContextManager[straw.SharedFilesystemStore]],
        root: Path,
    ) -> None:
        self._writers = [PoolWriter(open_store, root) for _ in range(MAX_AT_ONCE)]
        self._idle = list(range(MAX_AT_ONCE))
        """Numbers of writers without work, a heap."""
        self._changed = threading.Condition()

    def publish(self, publications: Sequence[straw.Publication], submission_id: str) -> list[PoolRef]:
        """As `PoolWriter.publish`, through the first writer that is idle."""
        with self._first_idle() as writer:
            return writer.publish(publications, submission_id)

    def close(self) -> None:
        """Wait for running publications, then close all writers."""
        with ExitStack() as closing:
            for writer in self._writers:
                closing.callback(writer.close)

    @contextmanager
    def _first_idle(self) -> Iterator[PoolWriter]:
        with self._changed:
            self._changed.wait_for(lambda: self._idle)
            number = heapq.heappop(self._idle)
        try:
            yield self._writers[number]
        finally:
            with self._changed:
                heapq.heappush(self._idle, number)
                self._changed.notify()
