"""Lazy microbatches that tell how they were read."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

from vime.data.batch import PackedMicrobatch
from vime.data.lazy import LazyMicrobatches


class WatchedBatches(LazyMicrobatches):
    """Each microbatch is made when it is asked for, and counted while somebody holds it."""

    def __init__(self, batches: Sequence[PackedMicrobatch]) -> None:
        self._batches = batches
        self._made: list[weakref.ref[PackedMicrobatch]] = []
        self.most_held = 0
        """Most microbatches that existed at once, of those read with candidates."""
        self.narrow: WatchedBatches | None = None
        """The one that reads without candidates, once there is one."""

    @property
    def num_reads(self) -> int:
        """Microbatches read, with their candidates."""
        return len(self._made)

    @property
    def num_narrow_reads(self) -> int:
        """Microbatches read without candidates."""
        return 0 if self.narrow is None else self.narrow.num_reads

    @property
    def token_counts(self) -> list[int]:
        return [batch.num_tokens for batch in self._batches]

    def read(self, number: int) -> PackedMicrobatch:
        made = replace(self._batches[number])
        self._made.append(weakref.ref(made))
        self.most_held = max(self.most_held, sum(reference() is not None for reference in self._made))
        return made

    def without_candidates(self) -> WatchedBatches:
        self.narrow = self.narrow or WatchedBatches(
            [replace(batch, top_k=None, nucleus=None, routes=None) for batch in self._batches]
        )
        return self.narrow
