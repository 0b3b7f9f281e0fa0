"""What one trainer rank reads of a plan: the rows of its own samples, packed microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Protocol, overload

import numpy as np

from pipeline.planner import BatchPlan, PlannedSample, StepPlan
from storage.columns import Array
from storage.prefetch import Prefetcher
from storage.refs import GroupRef
from vime.data.batch import LazyMicrobatches, PackedMicrobatch, StepTotals

MICROBATCHES_AHEAD = 2


class RowSource(Protocol):
    """The part of a pool that a rank needs."""

    def read_rows(self, ref: GroupRef, column: str, member: int, start: int = 0, stop: int | None = None) -> Array: ...


class RankShard:
    """The microbatches of one data-parallel rank in a plan; the next ones are read in the background.

    At most `ahead` microbatches wait in memory beside those that the caller holds, across the steps of the plan.
    """

    def __init__(self, pool: RowSource, plan: BatchPlan, rank: int, *, ahead: int = MICROBATCHES_AHEAD) -> None:
        self._steps = [_members(plan, step, rank) for step in plan.steps]
        loads = [partial(_read, pool, plan, members, filler=filler) for step in self._steps for members, filler in step]
        self._prefetcher: Prefetcher[PackedMicrobatch] = Prefetcher(loads, ahead=ahead)

    def step(self, number: int) -> StepMicrobatches:
        """The microbatches of one optimizer step."""
        first = sum(map(len, self._steps[:number]))
        token_counts = [sum(sample.total_length for sample in members) for members, _ in self._steps[number]]
        return StepMicrobatches(self._prefetcher, first, token_counts)

    @property
    def waited_s(self) -> float:
        """Seconds that callers waited for microbatches."""
        return self._prefetcher.waited_s

    def close(self) -> None:
        """Stop reading ahead."""
        self._prefetcher.close()

    def __enter__(self) -> RankShard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StepMicrobatches(LazyMicrobatches):
    """One step's microbatches, each read when it is asked for (or shortly before).

    Asking raises what reading raised: `CorruptDataError` or `StorageError`.
    """

    def __init__(self, prefetcher: Prefetcher[PackedMicrobatch], first: int, token_counts: Sequence[int]) -> None:
        self._prefetcher, self._first, self._token_counts = prefetcher, first, token_counts

    @property
    def token_counts(self) -> Sequence[int]:
        return self._token_counts

    @overload
    def __getitem__(self, number: int) -> PackedMicrobatch: ...
    @overload
    def __getitem__(self, number: slice) -> list[PackedMicrobatch]: ...
    def __getitem__(self, number: int | slice) -> PackedMicrobatch | list[PackedMicrobatch]:
        numbers = range(len(self))[number]
        if isinstance(numbers, range):
            return [self._prefetcher.take(self._first + each) for each in numbers]
        return self._prefetcher.take(self._first + numbers)


def totals(step: StepPlan) -> StepTotals:
    return StepTotals(num_rollouts=step.num_rollouts, num_trained_tokens=step.num_trained_tokens)


def _members(plan: BatchPlan, step: StepPlan, rank: int) -> list[tuple[list[PlannedSample], bool]]:
    """The samples of each microbatch of `rank`, and whether they only fill it.

    An empty microbatch (there were fewer samples than would give each rank as many) is filled with a fully masked
    copy of the rank's first sample, so that all ranks take part in every collective.
    """
    first = [numbers[0] for numbers in step.ranks[rank] if numbers][:1]
    return [([plan.samples[number] for number in numbers or first], not numbers) for numbers in step.ranks[rank]]


def _read(pool: RowSource, plan: BatchPlan, members: Sequence[PlannedSample], *, filler: bool) -> PackedMicrobatch:
    def rows(name: str, lengths: Sequence[int]) -> list[Array]:
        return [
            pool.read_rows(plan.groups[sample.group].ref, name, sample.member, 0, length)
            for sample, length in zip(members, lengths, strict=True)
        ]

    total_lengths = [sample.total_length for sample in members]
    response_lengths = [sample.response_length for sample in members]
    masks = rows("loss_mask", response_lengths)
    return PackedMicrobatch(
        tokens=np.concatenate(rows("tokens", total_lengths)),
        cu_seqlens=np.cumsum([0, *total_lengths], dtype=np.int32),
        response_lengths=np.asarray(response_lengths, np.int32),
        loss_mask=np.concatenate([np.zeros_like(mask) for mask in masks] if filler else masks),
        sampler_log_probs=np.concatenate(rows("sampler_log_probs", response_lengths)),
        advantages=np.asarray([0.0 if filler else sample.advantage for sample in members], np.float32),
        mask_sums=np.asarray([sample.mask_sum for sample in members], np.float32),
        sample_indices=np.asarray([sample.sample_index for sample in members], np.int64),
    )
