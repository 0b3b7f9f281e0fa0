"""Neighbouring microbatches as one: the same tokens in the same order, results taken apart again."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.watched_batches import WatchedBatches
from vime.data.batch import NucleusRows, PackedMicrobatch, RouteRows
from vime.data.merged import MergedMicrobatches, merged


def microbatch(seed: int, *, nucleus: bool = False) -> PackedMicrobatch:
    rng = np.random.default_rng(seed)
    responses = rng.integers(1, 5, int(rng.integers(1, 4)))
    totals, num = responses + rng.integers(1, 4, len(responses)), int(responses.sum())
    lengths = rng.integers(0, 3, num)
    return PackedMicrobatch(
        tokens=rng.integers(0, 99, totals.sum()).astype(np.int32),
        cu_seqlens=np.cumsum([0, *totals]).astype(np.int32),
        response_lengths=responses.astype(np.int32),
        loss_mask=rng.integers(0, 2, num).astype(np.uint8),
        sampler_log_probs=rng.random(num).astype(np.float32),
        advantages=rng.random(len(responses)).astype(np.float32),
        mask_sums=np.ones(len(responses), np.float32),
        sample_indices=np.arange(len(responses)) + 10 * seed,
        nucleus=NucleusRows(np.arange(lengths.sum(), dtype=np.int32), np.cumsum([0, *lengths])) if nucleus else None,
    )


def flat(rows: Iterable[Iterable[int]]) -> list[int]:
    return [int(item) for row in rows for item in row]


def lengths_of(batch: PackedMicrobatch) -> Iterable[int]:
    return np.diff(batch.cu_seqlens)


def nuclei_of(batch: PackedMicrobatch) -> Iterable[int]:
    """Ids that each response token has."""
    return np.diff(batch.nucleus.offsets) if batch.nucleus is not None else [0] * len(batch.loss_mask)


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(1, 4))
def test_sequences_keep_their_order_tokens_and_nuclei_and_results_come_apart(nuclei: list[bool], size: int) -> None:
    batches = [microbatch(seed, nucleus=nucleus) for seed, nucleus in enumerate(nuclei)]
    lazy = MergedMicrobatches(WatchedBatches(batches), size)
    found = list(lazy)
    assert list(lazy.token_counts) == [each.num_tokens for each in found]
    assert len(found) == -(-len(batches) // size)
    for name in ("tokens", "response_lengths", "loss_mask", "sampler_log_probs", "sample_indices"):
        values = [np.concatenate([vars(each)[name] for each in group]) for group in (found, batches)]
        assert np.array_equal(*values), name
    assert flat(lengths_of(each) for each in found) == flat(lengths_of(each) for each in batches)
    assert flat(nuclei_of(each) for each in found) == flat(nuclei_of(each) for each in batches)
    scores = [np.stack([each.sampler_log_probs, -each.sampler_log_probs]) for each in found]
    for batch, part in zip(batches, lazy.taken_apart(scores), strict=True):
        assert np.array_equal(part, np.stack([batch.sampler_log_probs, -batch.sampler_log_probs]))


def test_routes_are_refused() -> None:
    routes = RouteRows(np.zeros((3, 1, 1), np.uint8), np.arange(3), (0,), np.ones(1, bool))
    batch = microbatch(1)
    with pytest.raises(ValueError, match="routes"):
        merged([PackedMicrobatch(**{**vars(batch), "routes": routes}), batch])


def test_candidates_are_left_unread_where_they_are_left_out() -> None:
    watched = WatchedBatches([microbatch(seed, nucleus=True) for seed in range(3)])
    assert all(each.nucleus is None for each in MergedMicrobatches(watched, 2).without_candidates())
    assert (watched.num_reads, watched.num_narrow_reads) == (0, 3)
