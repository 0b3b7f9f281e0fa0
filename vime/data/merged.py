"""Neighbouring microbatches as one, for passes that need less memory than training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vime.data.batch import NucleusRows, PackedMicrobatch
from vime.data.lazy import LazyMicrobatches, token_counts, without_candidates


class MergedMicrobatches(LazyMicrobatches):
    """Each `size` neighbours of a source as one microbatch; the last one may have fewer.

    Merged are the tokens and what says which of them are responses, and the nucleus; what only a loss reads is not.
    """

    def __init__(self, source: Sequence[PackedMicrobatch], size: int) -> None:
        self._source, self._size = source, size
        self._response_counts: dict[int, list[int]] = {}

    @property
    def token_counts(self) -> Sequence[int]:
        counts = token_counts(self._source)
        return [sum(counts[first : first + self._size]) for first in range(0, len(counts), self._size)]

    def read(self, number: int) -> PackedMicrobatch:
        members = [
            self._source[each]
            for each in range(number * self._size, min((number + 1) * self._size, len(token_counts(self._source))))
        ]
        self._response_counts[number] = [len(member.loss_mask) for member in members]
        return merged(members)

    def without_candidates(self) -> MergedMicrobatches:
        return MergedMicrobatches(without_candidates(self._source), self._size)

    def taken_apart(self, arrays: Sequence[npt.NDArray[np.float32]]) -> list[npt.NDArray[np.float32]]:
        """Results [..., R] of each merged microbatch, all of which have been read, as those of the source's."""
        return [
            part
            for number, array in enumerate(arrays)
            for part in np.split(array, np.cumsum(self._response_counts[number])[:-1], axis=-1)
        ]


def merged(members: Sequence[PackedMicrobatch]) -> PackedMicrobatch:
    """The sequences of all `members`, one microbatch after the other. Raises `ValueError` for those with routes."""
    if any(member.routes is not None for member in members):
        raise ValueError("microbatches with routes can't be merged")
    starts = np.cumsum([0, *(member.num_tokens for member in members[:-1])])
    ends = [member.cu_seqlens[1:] + start for member, start in zip(members, starts, strict=True)]
    return PackedMicrobatch(
        tokens=np.concatenate([member.tokens for member in members]),
        cu_seqlens=np.concatenate([np.zeros(1, np.int32), *ends]).astype(np.int32),
        response_lengths=np.concatenate([member.response_lengths for member in members]),
        loss_mask=np.concatenate([member.loss_mask for member in members]),
        sampler_log_probs=np.concatenate([member.sampler_log_probs for member in members]),
        advantages=np.concatenate([member.advantages for member in members]),
        mask_sums=np.concatenate([member.mask_sums for member in members]),
        sample_indices=np.concatenate([member.sample_indices for member in members]),
        nucleus=_nucleus(members),
    )


def _nucleus(members: Sequence[PackedMicrobatch]) -> NucleusRows | None:
    """Empty where a member has none, which means the whole vocabulary there."""
    if all(member.nucleus is None for member in members):
        return None
    ids, lengths = [np.zeros(0, np.int32)], []
    for member in members:
        if member.nucleus is None:
            lengths.append(np.zeros(len(member.loss_mask), np.int64))
        else:
            ids.append(member.nucleus.ids)
            lengths.append(np.diff(member.nucleus.offsets))
    return NucleusRows(np.concatenate(ids), np.concatenate([[0], np.cumsum(np.concatenate(lengths))]))
