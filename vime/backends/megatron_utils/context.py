"""Which tokens of a pack each rank of context parallelism holds, and what their queries may see.

Pure functions on the boundaries of a pack: the start of each sequence, then the number of tokens T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]


class ContextLayout(Enum):
    """How a pack is cut over the ranks of context parallelism."""

    ZIGZAG = "zigzag"
    """Each sequence in 2 x size chunks; rank r holds chunks r and 2 x size - 1 - r, so that all attend alike much."""
    CONTIGUOUS = "contiguous"
    """The whole pack in `size` equal parts, one after the other; sequences need no padding of their own."""


@dataclass(frozen=True)
class ContextShare:
    """This rank's place among those that share the tokens of a pack."""

    rank: int = 0
    size: int = 1
    layout: ContextLayout = ContextLayout.ZIGZAG

    @property
    def sequence_multiple(self) -> int:
        """Each sequence is padded to a multiple of this."""
        return 2 * self.size if self.size > 1 and self.layout is ContextLayout.ZIGZAG else 1

    def of_rank(self, rank: int) -> ContextShare:
        return ContextShare(rank, self.size, self.layout)


WHOLE = ContextShare()
"""One rank holds all tokens."""


@dataclass(frozen=True)
class QueryRun:
    """Consecutive queries of one sequence on one rank; the last of them sees all of the run's keys."""

    query_start: int
    """Place among the rank's own tokens."""
    num_queries: int
    key_start: int
    """Place in the whole pack: the start of the sequence."""
    num_keys: int


def padded_boundaries(lengths: Sequence[int], share: ContextShare, rank_multiple: int = 1) -> Positions:
    """Boundaries of the pack whose sequences have `lengths` before padding.

    Sequences are padded as the layout needs it, then the pack with a sequence of its own, so that every rank gets the
    same number of tokens, a multiple of `rank_multiple`.
    """
    unit = share.sequence_multiple
    padded = [-(-length // unit) * unit for length in lengths]
    rest = -sum(padded) % math.lcm(unit, share.size * rank_multiple)
    return np.cumsum([0, *padded, *([rest] if rest else [])], dtype=np.int64)


def positions_of_rank(boundaries: Positions, share: ContextShare) -> Positions:
    """Places in the pack that this rank holds, ascending, [T / size]."""
    total = int(boundaries[-1])
    if share.layout is ContextLayout.CONTIGUOUS or share.size == 1:
        part = total // share.size
        return np.arange(share.rank * part, (share.rank + 1) * part)
    chunks = np.diff(boundaries) // (2 * share.size)
    spans = [np.zeros(0, np.int64)]
    for start, chunk in zip(boundaries[:-1].tolist(), chunks.tolist(), strict=True):
        numbers = (share.rank, 2 * share.size - 1 - share.rank)
        spans += [np.arange(start + number * chunk, start + (number + 1) * chunk) for number in numbers]
    return np.concatenate(spans)


def token_places(lengths: Sequence[int], boundaries: Positions) -> Positions:
    """Where in the padded pack each of the T tokens of sequences of `lengths` end to end is, [T] ascending."""
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    shifts = np.repeat(boundaries[: len(lengths)] - starts[:-1], lengths)
    return np.arange(int(starts[-1])) + shifts


def find(wanted: Positions, held: Positions) -> tuple[npt.NDArray[np.bool_], Positions]:
    """(which of the `wanted` places are among the ascending `held` ones, where those are in `held`)."""
    if not len(held):
        return np.zeros(len(wanted), bool), np.zeros(0, np.int64)
    found = np.searchsorted(held, wanted).clip(max=len(held) - 1)
    own = held[found] == wanted
    return own, found[own]


def tokens_of_rank(lengths: Sequence[int], share: ContextShare, rank_multiple: int = 1) -> tuple[Positions, Positions]:
    """(which tokens of sequences of `lengths` end to end this rank holds, where among its own, padding included)."""
    boundaries = padded_boundaries(lengths, share, rank_multiple)
    own, rows = find(token_places(lengths, boundaries), positions_of_rank(boundaries, share))
    return np.flatnonzero(own), rows


def gathered_order(boundaries: Positions, share: ContextShare) -> Positions:
    """Where each token of the pack [T] lies in the parts of all ranks laid end to end."""
    return np.argsort(np.concatenate([positions_of_rank(boundaries, share.of_rank(r)) for r in range(share.size)]))


def query_runs(boundaries: Positions, share: ContextShare) -> tuple[QueryRun, ...]:
    """This rank's tokens as runs, in order; together they are all of its tokens."""
    positions = positions_of_rank(boundaries, share)
    if not len(positions):
        return ()
    sequence = np.searchsorted(boundaries, positions, side="right") - 1
    breaks = np.flatnonzero((np.diff(positions) != 1) | (np.diff(sequence) != 0)) + 1
    runs = []
    for first, end in zip([0, *breaks.tolist()], [*breaks.tolist(), len(positions)], strict=True):
        key_start = int(boundaries[sequence[first]])
        runs.append(QueryRun(first, end - first, key_start, int(positions[end - 1]) + 1 - key_start))
    return tuple(runs)
