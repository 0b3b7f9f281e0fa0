"""Microbatches that are read when they are asked for, so that memory holds a few of them and not a rollout batch."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, overload

from vime.data.batch import PackedMicrobatch

TokenResults = Mapping[str, Any]
"""Field of `PackedMicrobatch` -> float32 [R]."""


class LazyMicrobatches(Sequence[PackedMicrobatch]):
    """Microbatches that are read when they are asked for; ask in order. Asked for again, they are read again."""

    @property
    @abstractmethod
    def token_counts(self) -> Sequence[int]:
        """Tokens of each microbatch, known without reading it."""

    @abstractmethod
    def read(self, number: int) -> PackedMicrobatch:
        """Microbatch `number`, from 0."""

    @abstractmethod
    def without_candidates(self) -> LazyMicrobatches:
        """The same without `top_k`, `nucleus` and `routes`, by far the largest part, which isn't read then."""

    def __len__(self) -> int:
        return len(self.token_counts)

    @overload
    def __getitem__(self, number: int) -> PackedMicrobatch: ...
    @overload
    def __getitem__(self, number: slice) -> list[PackedMicrobatch]: ...
    def __getitem__(self, number: int | slice) -> PackedMicrobatch | list[PackedMicrobatch]:
        numbers = range(len(self))[number]
        return [self.read(each) for each in numbers] if isinstance(numbers, range) else self.read(numbers)


class PreparedMicrobatches(LazyMicrobatches):
    """Microbatches with per-token results beside what is read; only the results stay in memory."""

    def __init__(self, source: Sequence[PackedMicrobatch], results: Sequence[TokenResults]) -> None:
        """Take one of `results` for each microbatch of `source`."""
        self._source, self._results = source, results

    @property
    def token_counts(self) -> Sequence[int]:
        return token_counts(self._source)

    def read(self, number: int) -> PackedMicrobatch:
        return dataclasses.replace(self._source[number], **self._results[number])

    def without_candidates(self) -> PreparedMicrobatches:
        return PreparedMicrobatches(without_candidates(self._source), self._results)


def token_counts(microbatches: Sequence[PackedMicrobatch]) -> Sequence[int]:
    """Tokens of each microbatch."""
    if isinstance(microbatches, LazyMicrobatches):
        return microbatches.token_counts
    return [microbatch.num_tokens for microbatch in microbatches]


def without_candidates(microbatches: Sequence[PackedMicrobatch]) -> Sequence[PackedMicrobatch]:
    """For what doesn't look at `top_k`, `nucleus` and `routes`: lazy microbatches are read without them."""
    return microbatches.without_candidates() if isinstance(microbatches, LazyMicrobatches) else microbatches
