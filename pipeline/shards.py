"""What one trainer rank reads of a plan: the rows of its own samples, packed microbatch by microbatch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType

import numpy as np

from pipeline.candidates import NO_CANDIDATES, read_nucleus, read_teacher, read_top_k
from pipeline.members import RowSource, StoredMember
from pipeline.planner import BatchPlan, StepPlan
from pipeline.routes import read_routes
from pipeline.shard_needs import NO_NEEDS, ShardNeeds
from storage.columns import Array
from storage.prefetch import Prefetcher
from vime.data.batch import PackedMicrobatch, RouteRows, StepTotals
from vime.data.lazy import LazyMicrobatches

MICROBATCHES_AHEAD = 2


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
        needs: ShardNeeds = NO_NEEDS,
        ahead: int = MICROBATCHES_AHEAD,
    ) -> None:
        self._steps = [_members(pool, plan, step, rank) for step in plan.steps]
        microbatches = [microbatch for step in self._steps for microbatch in step]

        def prefetcher(needs: ShardNeeds) -> Prefetcher[PackedMicrobatch]:
            return Prefetcher([partial(_read, *microbatch, needs) for microbatch in microbatches], ahead=ahead)

        whole = prefetcher(needs)
        narrow = dataclasses.replace(needs, candidates=NO_CANDIDATES)
        self._sources = _Sources(whole, whole if narrow == needs else prefetcher(narrow))
        if (part := needs.routes) is not None:
            loads = [partial(read_routes, members, part, trained=not filler) for members, filler in microbatches]
            self._sources.routes = Prefetcher(loads, ahead=needs.routes_ahead)

    def step(self, number: int) -> StepMicrobatches:
        """The microbatches of one optimizer step."""
        first = sum(map(len, self._steps[:number]))
        token_counts = [sum(member.sample.total_length for member in members) for members, _ in self._steps[number]]
        return StepMicrobatches(self._sources, first, token_counts)

    @property
    def waited_s(self) -> float:
        """Seconds that callers waited for microbatches."""
        return sum(prefetcher.waited_s for prefetcher in self._sources.prefetchers)

    @property
    def samples_without_routes(self) -> list[int]:
        """`Sample.index` of those among the microbatches taken so far that have none, where routes are read."""
        return sorted(self._sources.without_routes)

    def close(self) -> None:
        """Stop reading ahead."""
        for prefetcher in self._sources.prefetchers:
            prefetcher.close()

    def __enter__(self) -> RankShard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass
class _Sources:
    """Where the microbatches of a plan come from, by number over all its steps."""

    whole: Prefetcher[PackedMicrobatch]
    narrow: Prefetcher[PackedMicrobatch]
    """Without candidates."""
    routes: Prefetcher[RouteRows] | None = None
    without_routes: set[int] = field(default_factory=set)

    @property
    def prefetchers(self) -> set[Prefetcher[PackedMicrobatch] | Prefetcher[RouteRows]]:
        return {self.whole, self.narrow, *([] if self.routes is None else [self.routes])}

    def take(self, number: int) -> PackedMicrobatch:
        packed = self.whole.take(number)
        if self.routes is None:
            return packed
        routes = self.routes.take(number)
        self.without_routes.update(packed.sample_indices[~routes.recorded].tolist())
        return dataclasses.replace(packed, routes=routes)


class StepMicrobatches(LazyMicrobatches):
    """One step's microbatches, each read when it is asked for (or shortly before).

    Asking raises what reading raised: `CorruptDataError`, `StorageError`, or `TrainerError` for what is needed of a
    trained sample and isn't stored.
    """

    def __init__(
        self, sources: _Sources, first: int, token_counts: Sequence[int], *, with_candidates: bool = True
    ) -> None:
        self._sources, self._first, self._token_counts = sources, first, token_counts
        self._with_candidates = with_candidates

    @property
    def token_counts(self) -> Sequence[int]:
        return self._token_counts

    def read(self, number: int) -> PackedMicrobatch:
        take = self._sources.take if self._with_candidates else self._sources.narrow.take
        return take(self._first + number)

    def without_candidates(self) -> StepMicrobatches:
        return StepMicrobatches(self._sources, self._first, self._token_counts, with_candidates=False)


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


def _read(members: Sequence[StoredMember], filler: bool, needs: ShardNeeds) -> PackedMicrobatch:
    """All of a microbatch but its routes."""
    samples = [member.sample for member in members]
    total_lengths = [sample.total_length for sample in samples]
    response_lengths = [sample.response_length for sample in samples]

    def rows(name: str, lengths: Sequence[int]) -> list[Array]:
        return [member.rows(name, length) for member, length in zip(members, lengths, strict=True)]

    masks = rows("loss_mask", response_lengths)
    masks = [
        np.zeros_like(mask) if filler or sample.removed else mask for mask, sample in zip(masks, samples, strict=True)
    ]
    wanted = needs.candidates
    return PackedMicrobatch(
        tokens=np.concatenate(rows("tokens", total_lengths)),
        cu_seqlens=np.cumsum([0, *total_lengths], dtype=np.int32),
        response_lengths=np.asarray(response_lengths, np.int32),
        loss_mask=np.concatenate(masks),
        sampler_log_probs=np.concatenate(rows("sampler_log_probs", response_lengths)),
        advantages=np.asarray([0.0 if filler else sample.advantage for sample in samples], np.float32),
        mask_sums=np.asarray([sample.mask_sum for sample in samples], np.float32),
        sample_indices=np.asarray([sample.sample_index for sample in samples], np.int64),
        teacher_log_probs=read_teacher(members, masks) if needs.teacher else None,
        top_k=None if wanted.top_k is None else read_top_k(members, masks, wanted.top_k),
        nucleus=read_nucleus(members, masks, log_probs=wanted.nucleus_log_probs) if wanted.nucleus else None,
    )
