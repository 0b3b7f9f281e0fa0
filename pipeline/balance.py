"""Sharing samples out among ranks so that each gets as much work. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Mapping


def share_out(costs: Mapping[int, float], num_ranks: int, *, most: int | None = None) -> list[list[int]]:
    """Samples of each rank, with nearly equal sums of `costs` (above 0, by sample number); no rank stays empty.

    The costliest sample goes first, each to the rank that has least so far; equal ones by number. Without `most`, the
    greatest number of samples of a rank, the greatest sum is at most 4/3 of the least possible (Graham, 1969), and
    close to it when a rank has a dozen samples or more: the small ones at the end even out what the large ones left.

    Raises:
        ValueError: fewer samples than ranks, or more than `most` for each.
    """
    require_one_each(len(costs), num_ranks)
    if most is not None and len(costs) > most * num_ranks:
        raise ValueError(f"{len(costs)} samples don't fit {num_ranks} ranks of {most}")
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    lightest = [(0.0, rank) for rank in range(num_ranks)]
    for number in sorted(costs, key=lambda number: (-costs[number], number)):
        total, rank = heapq.heappop(lightest)
        ranks[rank].append(number)
        if len(ranks[rank]) != most:
            heapq.heappush(lightest, (total + costs[number], rank))
    return ranks


def require_one_each(num_samples: int, num_ranks: int) -> None:
    if num_samples < num_ranks:
        raise ValueError(f"{num_samples} samples can't give {num_ranks} ranks a microbatch each")
