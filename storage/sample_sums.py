"""Sums over the samples of a group: what is reported of them and is of no use to planning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from storage.repetition import is_repetitive
from vime.utils.types import Sample


class SampleSums(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All zero where nothing is known."""

    num_repetitive: int = 0
    """Samples whose response repeats itself."""
    num_cached_tokens: int = 0
    """Prompt tokens that engines had in their prefix cache, over all requests for the samples."""
    num_kept_tokens: int = 0
    """Tokens that top-p left to sample from, over"""
    num_kept_positions: int = 0
    """the positions where they were recorded."""
    num_drafted_tokens: int = 0
    """Speculative decoding: tokens that were drafted,"""
    num_accepted_tokens: int = 0
    """those of them that became part of a response,"""
    num_verify_steps: int = 0
    """steps of the model that verified drafts,"""
    num_verified_tokens: int = 0
    """and all tokens sampled for samples that had such steps."""


def sample_sums(samples: Sequence[Sample]) -> SampleSums:
    """Those of some samples."""
    return total(map(_of_one, samples))


def total(sums: Iterable[SampleSums]) -> SampleSums:
    """Field by field; zeros for none."""
    columns = zip(*map(msgspec.structs.astuple, sums), strict=True)
    return SampleSums(*map(sum, columns))


def _of_one(sample: Sample) -> SampleSums:
    speculation = sample.spec_info
    num_kept, num_positions = _kept(sample)
    return SampleSums(
        num_repetitive=int(is_repetitive(sample.response)),
        num_cached_tokens=sample.prefix_cache_info.cached_tokens,
        num_kept_tokens=num_kept,
        num_kept_positions=num_positions,
        num_drafted_tokens=speculation.spec_draft_token_num,
        num_accepted_tokens=speculation.spec_accept_token_num,
        num_verify_steps=speculation.spec_verify_ct,
        num_verified_tokens=speculation.completion_token_num if speculation.spec_verify_ct else 0,
    )


def _kept(sample: Sample) -> tuple[int, int]:
    """(tokens that top-p left, positions that have any)"""
    if sample.rollout_top_p_token_offsets is None:
        return 0, 0
    widths = np.diff(sample.rollout_top_p_token_offsets)
    return int(widths.sum()), int(np.count_nonzero(widths))
