"""A pool that so many threads of a process use at once, and no more."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from storage.columns import Array, EncodedGroup
from storage.contracts import PayloadPool
from storage.refs import GroupRef, PoolRef


class BoundedPool:
    """Reads and writes of `pool`, at most `concurrency` of them at once (at least 1); others wait their turn.

    Each call is as the pool's own. Thread-safe if the pool is.
    """

    def __init__(self, pool: PayloadPool, concurrency: int) -> None:
        self._pool = pool
        self._turns = threading.BoundedSemaphore(concurrency)

    @property
    def run_id(self) -> str:
        return self._pool.run_id

    def publish_groups(self, items: Sequence[tuple[EncodedGroup, bytes]], *, submission_id: str) -> list[GroupRef]:
        with self._turns:
            return self._pool.publish_groups(items, submission_id=submission_id)

    def publish_prompts(self, payloads: Sequence[bytes], *, submission_id: str) -> list[PoolRef]:
        with self._turns:
            return self._pool.publish_prompts(payloads, submission_id=submission_id)

    def publish_blob(self, data: bytes, *, submission_id: str) -> PoolRef:
        with self._turns:
            return self._pool.publish_blob(data, submission_id=submission_id)

    def read_header(self, ref: GroupRef) -> bytes:
        with self._turns:
            return self._pool.read_header(ref)

    def read_blob(self, ref: PoolRef) -> bytes:
        with self._turns:
            return self._pool.read_blob(ref)

    def read_columns(self, ref: GroupRef, names: Sequence[str]) -> dict[str, Array]:
        with self._turns:
            return self._pool.read_columns(ref, names)

    def read_rows(self, ref: GroupRef, column: str, member: int, start: int = 0, stop: int | None = None) -> Array:
        with self._turns:
            return self._pool.read_rows(ref, column, member, start, stop)

    def num_rows(self, ref: GroupRef, column: str, member: int) -> int:
        with self._turns:
            return self._pool.num_rows(ref, column, member)

    def read_layers(
        self, ref: GroupRef, column: str, member: int, layers: range, start: int = 0, stop: int | None = None
    ) -> Array:
        with self._turns:
            return self._pool.read_layers(ref, column, member, layers, start, stop)

    def read_group(self, ref: GroupRef) -> EncodedGroup:
        with self._turns:
            return self._pool.read_group(ref)

    def close(self) -> None:
        """Close the pool."""
        self._pool.close()
