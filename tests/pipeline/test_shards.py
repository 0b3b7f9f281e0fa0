"""What a rank packs is what the groups hold, sample by sample, and it reads nothing else."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from pipeline.candidates import CandidateNeeds
from pipeline.planner import BatchPlan, PlannedGroup, PlannedSample, StepPlan
from pipeline.shards import RankShard, totals
from storage.columns import Array
from storage.refs import GroupRef, PoolRef
from vime.errors import CorruptDataError

LENGTHS = {(0, 0): (5, 2), (0, 1): (4, 3), (1, 0): (3, 1), (1, 1): (6, 4)}
REFS = [PoolRef("r", f"group {number}", "s", 1, "c", 1, "sha256", 0, 0, "d", 4, 100) for number in range(2)]


def plan(*steps: list[list[list[int]]]) -> BatchPlan:
    samples = [
        PlannedSample(group, member, 10 * group + member, total, response, 0.5 + group, float(response), 1.0, 0, False)
        for (group, member), (total, response) in LENGTHS.items()
    ]
    groups = [PlannedGroup(number, 100 + number, REFS[number]) for number in range(2)]
    return BatchPlan(1, "b", 0, 1, groups, samples, [StepPlan(4, 10, ranks) for ranks in steps])


class Rows:
    """Rows with numbers that tell where they come from; remembers which members were read."""

    def __init__(self, damaged: tuple[int, int] | None = None) -> None:
        self.read: list[tuple[int, int]] = []
        self.columns: set[str] = set()
        self._damaged = damaged

    def read_rows(self, ref: GroupRef, column: str, member: int, start: int = 0, stop: int | None = None) -> Array:
        group = REFS.index(ref)
        if column == "tokens":
            self.read.append((group, member))
        self.columns.add(column)
        if (group, member) == self._damaged:
            raise CorruptDataError(f"{ref.path} is damaged")
        first = 100 * group + 10 * member
        values = np.arange(first + start, first + (stop or 0))
        return {
            "tokens": values.astype(np.int32),
            "loss_mask": (values % 2).astype(np.uint8),
            "sampler_log_probs": -values.astype(np.float32),
            "top_k_ids": np.stack([values, values + 1], -1).astype(np.int32),
            "top_k_log_probs": np.stack([-values - 1, -values - 2], -1).astype(np.float16),
        }[column]

    def num_rows(self, ref: GroupRef, column: str, member: int) -> int:
        if column == "teacher_log_probs":
            return 0
        total, response = LENGTHS[REFS.index(ref), member]
        return total if column == "tokens" else response


def test_rows_of_each_sample_come_from_its_place_in_its_group() -> None:
    with RankShard(Rows(), plan([[[3, 0]]]), 0) as shard:
        (packed,) = shard.step(0)
    assert packed.tokens.tolist() == [110, 111, 112, 113, 114, 115, 0, 1, 2, 3, 4]
    assert packed.cu_seqlens.tolist() == [0, 6, 11]
    assert packed.response_lengths.tolist() == [4, 2]
    assert packed.sampler_log_probs.tolist() == [-110, -111, -112, -113, 0, -1]
    assert packed.loss_mask.tolist() == [0, 1, 0, 1, 0, 1]
    assert packed.advantages.tolist() == [1.5, 0.5]
    assert packed.sample_indices.tolist() == [11, 0]


def test_an_empty_microbatch_is_a_masked_copy_that_adds_nothing() -> None:
    with RankShard(Rows(), plan([[[1], []], [[2], [0, 3]]]), 0) as shard:
        real, filler = shard.step(0)
    assert filler.tokens.tolist() == real.tokens.tolist()
    assert filler.loss_mask.tolist() == [0, 0, 0]
    assert filler.advantages.tolist() == [0.0]


def test_an_empty_microbatch_is_filled_with_the_shortest_sample_of_its_rank() -> None:
    batch = plan([[[3], [0, 2], []], [[1], [], []]])
    with RankShard(Rows(), batch, 0) as shard:
        *_, filler = shard.step(0)
    assert filler.sample_indices.tolist() == [10]


def test_totals_of_the_step_are_those_of_the_plan() -> None:
    batch = plan([[[0, 1, 2, 3]]])
    assert (totals(batch.steps[0]).num_rollouts, totals(batch.steps[0]).num_trained_tokens) == (4, 10)


def test_a_rank_reads_only_the_members_that_it_trains_on() -> None:
    rows = Rows()
    with RankShard(rows, plan([[[1], []], [[2], [0, 3]]]), 1) as shard:
        list(shard.step(0))
    assert rows.read == [(1, 0), (0, 0), (1, 1)]


def test_sizes_are_known_without_reading() -> None:
    rows = Rows()
    with RankShard(rows, plan([[[3, 0], [1]]]), 0) as shard:
        assert (len(shard.step(0)), shard.step(0).token_counts) == (2, [11, 4])
    assert rows.read == []


def test_the_next_step_is_read_while_this_one_is_trained_and_no_further() -> None:
    started: list[int] = []
    second_step_began = threading.Event()

    class Watched(Rows):
        def read_rows(self, ref: GroupRef, column: str, member: int, start: int = 0, stop: int | None = None) -> Array:
            if column == "tokens":
                started.append(2 * REFS.index(ref) + member)
                if started[-1] == 1:
                    second_step_began.set()
            return super().read_rows(ref, column, member, start, stop)

    with RankShard(Watched(), plan([[[0]]], [[[1]]], [[[2]]], [[[3]]]), 0, ahead=1) as shard:
        list(shard.step(0))
        assert second_step_began.wait(10)
        assert 2 not in started
        list(shard.step(1))
        list(shard.step(2))
        list(shard.step(3))
    assert started == [0, 1, 2, 3]


def test_damage_found_ahead_surfaces_at_the_microbatch_that_has_it() -> None:
    with RankShard(Rows(damaged=(0, 1)), plan([[[0], [1], [2]]]), 0) as shard:
        step = shard.step(0)
        assert step[0].tokens.tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(CorruptDataError, match="group 0 is damaged"):
            step[1]
        assert step[2].tokens.tolist() == [100, 101, 102]


def test_candidates_are_read_only_where_they_are_asked_for() -> None:
    rows = Rows()
    with RankShard(rows, plan([[[0], [1]]]), 0, candidates=CandidateNeeds(top_k=2)) as shard:
        narrow = list(shard.step(0).without_candidates())
        assert "top_k_ids" not in rows.columns
        whole = list(shard.step(0))
    assert [batch.top_k for batch in narrow] == [None, None]
    assert [batch.tokens.tolist() for batch in narrow] == [batch.tokens.tolist() for batch in whole]
    assert [batch.top_k.ids.tolist() for batch in whole if batch.top_k is not None] == [
        [[0, 1], [1, 2]],
        [[10, 11], [11, 12], [12, 13]],
    ]


def test_a_step_can_be_read_again() -> None:
    with RankShard(Rows(), plan([[[0], [1]]], [[[2]]]), 0) as shard:
        steps = [shard.step(0), shard.step(1)]
        first = [batch.sample_indices.tolist() for step in steps for batch in step]
        assert [batch.sample_indices.tolist() for step in steps for batch in step] == first == [[0], [1], [10]]
