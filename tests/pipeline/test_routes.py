"""Each rank reads of the stored routes only what its routers replay, and gets exactly that."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.wide_groups import lease_bytes
from pipeline.candidates import CandidateNeeds
from pipeline.members import RowSource, StoredMember
from pipeline.planner import BatchPlan, PlannedGroup, PlannedSample, StepPlan
from pipeline.routes import read_routes
from pipeline.shard_needs import ShardNeeds, shard_needs
from pipeline.shards import RankShard
from storage.columns import Array, encode_group
from storage.pool import Pool
from storage.refs import GroupRef, PoolRef
from vime.backends.megatron_utils.context import (
    WHOLE,
    ContextLayout,
    ContextShare,
    padded_boundaries,
    positions_of_rank,
    token_places,
)
from vime.backends.megatron_utils.route_part import RoutePart
from vime.backends.megatron_utils.routes import routes_of
from vime.data.batch import PackedMicrobatch, RouteRows
from vime.errors import TrainerError
from vime.settings.parse import parse_settings
from vime.utils.types import Sample

NUM_LAYERS, TOP_K = 4, 2
ALL = RoutePart((0, 1, 2, 3), (0, 1, 2, 3), TOP_K)
NOWHERE = PoolRef("r", "group", "s", 1, "c", 1, "sha256", 0, 0, "d", 4, 100)


def routes(first: int, num_rows: int) -> Array:
    """[num_rows, NUM_LAYERS, TOP_K] numbers that tell member, token, layer and rank."""
    return (first + np.arange(num_rows * NUM_LAYERS * TOP_K)).reshape(num_rows, NUM_LAYERS, TOP_K)


class Stored:
    """Routes of one group in memory; counts the numbers that were read."""

    def __init__(self, members: Sequence[Array | None], trained: int = 1) -> None:
        self._members, self._trained, self.num_read = members, trained, 0

    def read_rows(self, _ref: GroupRef, _column: str, _member: int, start: int = 0, stop: int | None = None) -> Array:
        return np.full((stop or 0) - start, self._trained, np.uint8)

    def num_rows(self, _ref: GroupRef, _column: str, member: int) -> int:
        found = self._members[member]
        return 0 if found is None else len(found)

    def read_layers(
        self, _ref: GroupRef, _column: str, member: int, layers: range, start: int = 0, stop: int | None = None
    ) -> Array:
        found = self._members[member]
        assert found is not None
        part = found[start:stop, layers.start : layers.stop].transpose(1, 0, 2)
        self.num_read += part.size
        return part


def members_of(pool: RowSource, lengths: Sequence[int], ref: PoolRef = NOWHERE) -> list[StoredMember]:
    return [
        StoredMember(pool, ref, PlannedSample(0, number, 40 + number, length, 1, 0.0, 1.0, 1.0, 0, False))
        for number, length in enumerate(lengths)
    ]


def packed(lengths: Sequence[int], rows: RouteRows) -> PackedMicrobatch:
    ones = np.ones(len(lengths))
    return PackedMicrobatch(
        tokens=np.zeros(sum(lengths), np.int32),
        cu_seqlens=np.cumsum([0, *lengths], dtype=np.int32),
        response_lengths=ones.astype(np.int32),
        loss_mask=ones.astype(np.uint8),
        sampler_log_probs=-ones.astype(np.float32),
        advantages=ones.astype(np.float32),
        mask_sums=ones.astype(np.float32),
        sample_indices=np.arange(len(lengths)),
        routes=rows,
    )


@given(
    lengths=st.lists(st.integers(2, 23), min_size=1, max_size=5),
    absent=st.integers(0, 5),
    size=st.sampled_from([1, 2, 4]),
    layout=st.sampled_from(ContextLayout),
    multiple=st.sampled_from([1, 2]),
    layers=st.sets(st.integers(0, NUM_LAYERS - 1)),
)
@settings(max_examples=60, deadline=None)
def test_the_part_of_each_rank_is_what_its_routers_would_get_of_all_routes(
    lengths: list[int], absent: int, size: int, layout: ContextLayout, multiple: int, layers: set[int]
) -> None:
    stored = [None if number == absent else routes(1000 * number, n - 1) for number, n in enumerate(lengths)]
    whole = packed(lengths, read_routes(members_of(Stored(stored, trained=0), lengths), ALL))
    numbers = tuple(sorted(layers))
    for rank in range(size):
        share = ContextShare(rank, size, layout)
        boundaries = padded_boundaries(lengths, share, multiple)
        places, held = token_places(lengths, boundaries), positions_of_rank(boundaries, share)
        source = Stored(stored, trained=0)
        rows = read_routes(members_of(source, lengths), RoutePart(numbers, numbers, TOP_K, share, multiple))
        found, expected = routes_of(packed(lengths, rows), places, held), routes_of(whole, places, held)
        assert found is not None
        assert expected is not None
        assert (found.num_replayed, found.num_needed) == (expected.num_replayed, expected.num_needed)
        own = np.isin(held, places[rows.tokens])
        assert np.array_equal(found.ids[own], expected.ids[own][:, list(numbers)])
        assert source.num_read == found.num_replayed * len(numbers) * TOP_K


def test_layers_are_named_by_their_numbers_in_the_model() -> None:
    """Virtual stages hold layers apart from each other; a model may begin with layers without experts."""
    rows = read_routes(members_of(Stored([routes(0, 2)]), [3]), RoutePart((1, 4), (0, 3), TOP_K))
    assert rows.layers == (1, 4)
    assert rows.ids.tolist() == [[[0, 1], [6, 7]], [[8, 9], [14, 15]]]


def test_a_stage_without_experts_reads_nothing() -> None:
    source = Stored([routes(0, 2)])
    rows = read_routes(members_of(source, [3]), RoutePart((), (), TOP_K))
    assert (rows.ids.shape, rows.recorded.tolist(), source.num_read) == ((2, 0, TOP_K), [True], 0)


def test_a_trained_sample_without_routes_is_refused_by_its_index() -> None:
    members = members_of(Stored([routes(0, 2), None]), [3, 4])
    with pytest.raises(TrainerError, match="sample 41: no routes are stored, but it has 1 trained tokens") as caught:
        read_routes(members, ALL)
    assert "without routing replay" in (caught.value.next_step or "")
    assert read_routes(members, ALL, trained=False).recorded.tolist() == [True, False]


def test_rows_that_do_not_cover_the_sample_are_refused() -> None:
    with pytest.raises(TrainerError, match="sample 40: routes of 1 tokens are stored, allowed: 2"):
        read_routes(members_of(Stored([routes(0, 1)]), [3]), ALL)


def test_routes_of_another_model_are_refused() -> None:
    with pytest.raises(TrainerError, match="sample 40: 2 experts a token are stored, allowed: 3"):
        read_routes(members_of(Stored([routes(0, 2)]), [3]), RoutePart((0,), (0,), 3))


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with Pool.create(tmp_path / "pool", "run") as made:
        yield made


def test_routes_of_three_parts_come_back_in_order_for_all_tokens_but_the_last(pool: Pool) -> None:
    """A prompt of 3 tokens, continued twice: parts of 5, 7 and 4 tokens; the last token was never routed."""
    every = routes(0, 3 + 5 + 7 + 4 - 1) % 250
    sample = Sample(
        group_index=0,
        index=40,
        tokens=list(range(19)),
        response_length=16,
        rollout_log_probs=[-0.5] * 16,
        rollout_routed_experts=[every[:7], every[7:14], every[14:]],
        reward=1.0,
        status=Sample.Status.COMPLETED,
    )
    (ref,) = pool.publish_groups([(encode_group([sample]), lease_bytes())], submission_id="parts")
    member = StoredMember(pool, ref, PlannedSample(0, 0, 40, 19, 16, 0.0, 1.0, 1.0, 0, False))
    rows = read_routes([member], ALL)
    assert np.array_equal(rows.ids, every)
    assert rows.tokens.tolist() == list(range(3 + 15))
    assert rows.ids.dtype == np.uint8


class Watched(Stored):
    """Tells which members' routes were read, and when those of `awaited` were."""

    def __init__(self, awaited: int) -> None:
        super().__init__([routes(100 * number, 2) for number in range(4)])
        self.members: list[int] = []
        self.awaited, self.reached = awaited, threading.Event()

    def read_rows(self, ref: GroupRef, column: str, member: int, start: int = 0, stop: int | None = None) -> Array:
        return super().read_rows(ref, column, member, start, stop).astype(np.int32)

    def read_layers(
        self, ref: GroupRef, column: str, member: int, layers: range, start: int = 0, stop: int | None = None
    ) -> Array:
        self.members.append(member)
        if member == self.awaited:
            self.reached.set()
        return super().read_layers(ref, column, member, layers, start, stop)


def plan_of(*microbatches: list[int]) -> BatchPlan:
    samples = [PlannedSample(0, number, 40 + number, 3, 1, 0.0, 1.0, 1.0, 0, False) for number in range(4)]
    step = StepPlan(4, 4, [list(microbatches)])
    return BatchPlan(1, "b", 0, 1, [PlannedGroup(0, 100, NOWHERE)], samples, [step])


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_routes_of_as_many_microbatches_are_fetched_ahead_as_asked(ahead: int) -> None:
    source = Watched(awaited=ahead)
    with RankShard(source, plan_of([0], [1], [2], [3]), 0, needs=ShardNeeds(routes=ALL, routes_ahead=ahead)) as shard:
        first = shard.step(0)[0]
        assert source.reached.wait(10)
        assert source.members == list(range(ahead + 1))
    assert first.routes is not None
    assert np.array_equal(first.routes.ids, routes(0, 2))


def test_passes_that_look_at_no_routes_read_none() -> None:
    source = Watched(awaited=0)
    with RankShard(source, plan_of([0, 1], [2, 3]), 0, needs=ShardNeeds(routes=ALL)) as shard:
        narrow = list(shard.step(0).without_candidates())
        assert source.members == []
        whole = list(shard.step(0))
    assert [batch.routes for batch in narrow] == [None, None]
    assert [batch.routes.tokens.tolist() for batch in whole if batch.routes is not None] == [[0, 1, 3, 4]] * 2
    assert shard.samples_without_routes == []


def test_a_masked_copy_that_fills_a_microbatch_is_read_without_routes() -> None:
    source = Stored([routes(0, 2), None, None, None])
    plan = plan_of([0], [])
    with RankShard(source, plan, 0, needs=ShardNeeds(routes=ALL)) as shard:
        real, filler = shard.step(0)
    assert real.routes is not None
    assert filler.routes is not None
    assert np.array_equal(real.routes.ids, filler.routes.ids)
    assert shard.samples_without_routes == []


@pytest.mark.parametrize(
    ("words", "part", "needs"),
    [
        ("", None, ShardNeeds()),
        (
            "--use-rollout-routing-replay --routing-replay-prefetch-microbatches 3",
            ALL,
            ShardNeeds(routes=ALL, routes_ahead=3),
        ),
        ("--use-opd --opd-type vllm", None, ShardNeeds(teacher=True)),
        ("--use-opd --opd-type megatron", None, ShardNeeds()),
        ("--rollout-top-p 0.9", None, ShardNeeds(CandidateNeeds(nucleus=True))),
    ],
)
def test_the_objective_says_what_is_read_beside_the_tokens(words: str, part: Any, needs: ShardNeeds) -> None:
    assert shard_needs(parse_settings(words.split()), part) == needs


def test_one_rank_holds_all_tokens() -> None:
    assert RoutePart((0,), (0,), TOP_K, WHOLE).tokens([3, 2]).tolist() == [0, 1, 2, 3, 4]
