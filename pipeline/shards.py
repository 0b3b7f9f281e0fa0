"""What one trainer rank reads of a plan: the rows of its own samples, packed microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import TracebackType

import numpy as np

from pipeline.candidates import CandidateNeeds, read_nucleus, read_teacher, read_top_k
from pipeline.members import RowSource, StoredMember
from pipeline.planner import BatchPlan, StepPlan
from storage.columns import Array
from storage.prefetch import Prefetcher
from vime.data.batch import PackedMicrobatch, StepTotals
from vime.data.lazy import LazyMicrobatches

MICROBATCHES_AHEAD = 2
NO_CANDIDATES = CandidateNeeds()


class RankShard:
    """The microbatches of one data-parallel rank in a plan; the next ones are read in the background.

    At most `ahead` microbatches wait in memory beside those that the caller holds, across the steps of the plan.
    """

    def __init__(
        self,
        pool: RowSource,
        plan: BatchPlan,
        rank: int,
        *,
        candidates: CandidateNeeds = NO_CANDIDATES,
        ahead: int = MICROBATCHES_AHEAD,
    ) -> None:
        self._steps = [_members(pool, plan, step, rank) for step in plan.steps]

        def prefetcher(needs: CandidateNeeds) -> Prefetcher[PackedMicrobatch]:
            loads = [partial(_read, *microbatch, needs) for step in self._steps for microbatch in step]
            return Prefetcher(loads, ahead=ahead)

        self._whole = prefetcher(candidates)
        self._narrow = self._whole if candidates == NO_CANDIDATES else prefetcher(NO_CANDIDATES)

    def step(self, number: int) -> StepMicrobatches:
        """The microbatches of one optimizer step."""
        first = sum(map(len, self._steps[:number]))
        token_counts = [sum(member.sample.total_length for member in members) for members, _ in self._steps[number]]
        return StepMicrobatches(self._whole, self._narrow, first, token_counts)

    @property
    def waited_s(self) -> float:
        """Seconds that callers waited for microbatches."""
        return sum(prefetcher.waited_s for prefetcher in {self._whole, self._narrow})

    def close(self) -> None:
        """Stop reading ahead."""
        for prefetcher in (self._whole, self._narrow):
            prefetcher.close()

    def __enter__(self) -> RankShard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StepMicrobatches(LazyMicrobatches):
    """One step's microbatches, each read when it is asked for (or shortly before).

    Asking raises what reading raised: `CorruptDataError`, `StorageError`, or `TrainerError` for missing candidates.
    """

    def __init__(
        self,
        whole: Prefetcher[PackedMicrobatch],
        narrow: Prefetcher[PackedMicrobatch],
        first: int,
        token_counts: Sequence[int],
    ) -> None:
        self._whole, self._narrow, self._first, self._token_counts = whole, narrow, first, token_counts

    @property
    def token_counts(self) -> Sequence[int]:
        return self._token_counts

    def read(self, number: int) -> PackedMicrobatch:
        return self._whole.take(self._first + number)

    def without_candidates(self) -> StepMicrobatches:
        return StepMicrobatches(self._narrow, self._narrow, self._first, self._token_counts)


def totals(step: StepPlan) -> StepTotals:
    return StepTotals(num_rollouts=step.num_rollouts, num_trained_tokens=step.num_trained_tokens)


def _members(pool: RowSource, plan: BatchPlan, step: StepPlan, rank: int) -> list[tuple[list[StoredMember], bool]]:
    """The samples of each microbatch of `rank`, and whether they only fill it.

    An empty microbatch (there were fewer samples than would give each rank as many) is filled with a fully masked
    copy of the rank's shortest sample, so that all ranks take part in every collective.
    """

    def stored(numbers: Sequence[int]) -> list[StoredMember]:
        samples = [plan.samples[number] for number in numbers]
        return [StoredMember(pool, plan.groups[sample.group].ref, sample) for sample in samples]

    return [(stored(numbers or _shortest(plan, step, rank)), not numbers) for numbers in step.ranks[rank]]


def _shortest(plan: BatchPlan, step: StepPlan, rank: int) -> list[int]:
    numbers = (number for microbatch in step.ranks[rank] for number in microbatch)
    return [min(numbers, key=lambda number: (plan.samples[number].total_length, number))]


def _read(members: Sequence[StoredMember], filler: bool, candidates: CandidateNeeds) -> PackedMicrobatch:
    samples = [member.sample for member in members]
    total_lengths = [sample.total_length for sample in samples]
    response_lengths = [sample.response_length for sample in samples]

    def rows(name: str, lengths: Sequence[int]) -> list[Array]:
        return [member.rows(name, length) for member, length in zip(members, lengths, strict=True)]

    masks = rows("loss_mask", response_lengths)
    if filler:
        masks = [np.zeros_like(mask) for mask in masks]
    return PackedMicrobatch(
        tokens=np.concatenate(rows("tokens", total_lengths)),
        cu_seqlens=np.cumsum([0, *total_lengths], dtype=np.int32),
        response_lengths=np.asarray(response_lengths, np.int32),
        loss_mask=np.concatenate(masks),
        sampler_log_probs=np.concatenate(rows("sampler_log_probs", response_lengths)),
        advantages=np.asarray([0.0 if filler else sample.advantage for sample in samples], np.float32),
        mask_sums=np.asarray([sample.mask_sum for sample in samples], np.float32),
        sample_indices=np.asarray([sample.sample_index for sample in samples], np.int64),
        teacher_log_probs=read_teacher(members),
        top_k=None if candidates.top_k is None else read_top_k(members, masks, candidates.top_k),
        nucleus=read_nucleus(members, masks, log_probs=candidates.nucleus_log_probs) if candidates.nucleus else None,
    )
