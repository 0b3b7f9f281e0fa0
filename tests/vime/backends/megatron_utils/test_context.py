"""How a pack is cut over the ranks of context parallelism, and attention over the cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.backends.megatron_utils.context import (
    ContextLayout,
    ContextShare,
    gathered_order,
    padded_boundaries,
    positions_of_rank,
    query_runs,
)
from vime.backends.megatron_utils.shim import prepare_megatron

LENGTHS = st.lists(st.integers(1, 40), max_size=6)
SIZES = st.integers(1, 4)
LAYOUTS = st.sampled_from(ContextLayout)


@given(LENGTHS, SIZES, LAYOUTS, st.integers(1, 3))
@settings(deadline=None)
def test_every_token_is_on_one_rank_and_ranks_hold_equally_many(
    lengths: list[int], size: int, layout: ContextLayout, multiple: int
) -> None:
    shares = [ContextShare(rank, size, layout) for rank in range(size)]
    boundaries = padded_boundaries(lengths, shares[0], multiple)
    parts = [positions_of_rank(boundaries, share) for share in shares]
    assert sorted(np.concatenate(parts).tolist()) == list(range(int(boundaries[-1])))
    assert {len(part) for part in parts} == {int(boundaries[-1]) // size}
    assert len(parts[0]) % multiple == 0
    assert all((np.diff(part) > 0).all() for part in parts)


@given(LENGTHS, SIZES, LAYOUTS)
@settings(deadline=None)
def test_the_parts_of_all_ranks_come_back_in_order(lengths: list[int], size: int, layout: ContextLayout) -> None:
    share = ContextShare(0, size, layout)
    boundaries = padded_boundaries(lengths, share)
    ends = [positions_of_rank(boundaries, share.of_rank(rank)) for rank in range(size)]
    assert np.concatenate(ends)[gathered_order(boundaries, share)].tolist() == list(range(int(boundaries[-1])))


@given(LENGTHS, SIZES, LAYOUTS)
@settings(deadline=None)
def test_runs_are_the_ranks_tokens_with_all_that_is_before_them(
    lengths: list[int], size: int, layout: ContextLayout
) -> None:
    for rank in range(size):
        share = ContextShare(rank, size, layout)
        boundaries = padded_boundaries(lengths, share)
        positions = positions_of_rank(boundaries, share).tolist()
        seen = []
        for run in query_runs(boundaries, share):
            assert run.query_start == len(seen)
            assert run.key_start in boundaries
            end = run.key_start + run.num_keys
            seen += range(end - run.num_queries, end)
        assert seen == positions


def test_zigzag_pads_each_sequence_and_pairs_the_first_chunk_with_the_last() -> None:
    share = ContextShare(1, 2)
    boundaries = padded_boundaries([3, 8], share)
    assert boundaries.tolist() == [0, 4, 12]
    assert positions_of_rank(boundaries, share).tolist() == [1, 2, 6, 7, 8, 9]


def test_contiguous_cuts_the_pack_and_pads_its_end_only() -> None:
    share = ContextShare(1, 2, ContextLayout.CONTIGUOUS)
    boundaries = padded_boundaries([3, 8], share)
    assert boundaries.tolist() == [0, 3, 11, 12]
    assert positions_of_rank(boundaries, share).tolist() == [6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("layout", ContextLayout)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_attention_of_the_parts_is_dense_causal_attention(layout: ContextLayout, size: int) -> None:
    prepare_megatron()
    from vime.backends.megatron_utils.attention import bucketed_attention

    generator = torch.Generator().manual_seed(0)
    boundaries = padded_boundaries([5, 1, 17, 9, 30], ContextShare(0, size, layout))
    total = int(boundaries[-1])
    query = torch.randn(total, 4, 8, generator=generator)
    key, value = (torch.randn(total, 2, 8, generator=generator) for _ in range(2))
    sequence = np.searchsorted(boundaries, np.arange(total), side="right")
    allowed = torch.tensor(np.tril(sequence[:, None] == sequence[None]))
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(2, 1)) * 0.3
    expected = torch.einsum(
        "hqk,khd->qhd", scores.where(allowed, -torch.inf).softmax(-1), value.repeat_interleave(2, 1)
    )
    for rank in range(size):
        share = ContextShare(rank, size, layout)
        mine = positions_of_rank(boundaries, share)
        found = bucketed_attention(query[mine], key, value, query_runs(boundaries, share), 0.3)
        torch.testing.assert_close(found, expected[mine], rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ContextLayout)
def test_flash_kernel_gives_each_run_all_that_is_before_it(layout: ContextLayout) -> None:
    prepare_megatron()
    from vime.backends.megatron_utils.attention import bucketed_attention, flash_attention

    boundaries = padded_boundaries([50, 1, 170, 90, 300], ContextShare(0, 2, layout))
    total = int(boundaries[-1])
    query = torch.randn(total, 4, 64, device="cuda", dtype=torch.bfloat16)
    key, value = (torch.randn(total, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    for rank in range(2):
        share = ContextShare(rank, 2, layout)
        mine, runs = query[positions_of_rank(boundaries, share)], query_runs(boundaries, share)
        found = flash_attention(mine, key, value, runs, 0.2)
        expected = bucketed_attention(mine.float(), key.float(), value.float(), runs, 0.2)
        torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)
        weight = torch.randn_like(expected)
        gradients = torch.autograd.grad((found.float() * weight).sum(), (key, value))
        wanted = torch.autograd.grad((expected * weight).sum(), (key, value))
        for gradient, reference in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(gradient.float(), reference.float(), rtol=0.05, atol=0.05)
