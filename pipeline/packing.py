"""Sequence packing: which samples share a microbatch, and which rank gets it. Pure functions on lengths."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence


def pack_by_tokens(lengths: Mapping[int, int], max_tokens: int, *, multiple_of: int) -> list[list[int]]:
    """Best-fit decreasing into microbatches of at most `max_tokens` tokens.

    `lengths` maps a sample number to its tokens. A sample longer than `max_tokens` gets a microbatch of its own.
    The number of microbatches is raised to a multiple of `multiple_of`, so that every rank gets the same number, by
    halving the fullest ones; where none can be halved an empty one is added.

    Raises:
        ValueError: fewer samples than `multiple_of`.
    """
    if len(lengths) < multiple_of:
        raise ValueError(f"{len(lengths)} samples can't give {multiple_of} ranks a microbatch each")
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, bin), ascending
    for number in sorted(lengths, key=lambda number: (-lengths[number], number)):
        fit = bisect.bisect_left(rooms, (lengths[number], -1))
        if fit == len(rooms):
            bins.append([number])
            bisect.insort(rooms, (max_tokens - lengths[number], len(bins) - 1))
        else:
            room, chosen = rooms.pop(fit)
            bins[chosen].append(number)
            bisect.insort(rooms, (room - lengths[number], chosen))
    target = math.ceil(len(bins) / multiple_of) * multiple_of
    while len(bins) < target:
        divisible = [i for i, members in enumerate(bins) if len(members) > 1]
        if not divisible:
            bins.append([])
            continue
        fullest = max(divisible, key=lambda i: (_load(bins[i], lengths), -i))
        bins.extend(_halve(bins.pop(fullest), lengths))
    return [sorted(members) for members in bins]


def split_evenly(numbers: Sequence[int], size: int, num_ranks: int) -> list[list[int]]:
    """Microbatches of `size` samples in order; some are smaller, or empty, so that every rank gets as many.

    Raises:
        ValueError: fewer samples than ranks.
    """
    if len(numbers) < num_ranks:
        raise ValueError(f"{len(numbers)} samples can't give {num_ranks} ranks a microbatch each")
    count = math.ceil(math.ceil(len(numbers) / size) / num_ranks) * num_ranks
    edges = [round(i * len(numbers) / count) for i in range(count + 1)]
    return [list(numbers[a:b]) for a, b in itertools.pairwise(edges)]


def deal_to_ranks(
    microbatches: Sequence[Sequence[int]], lengths: Mapping[int, int], num_ranks: int
) -> list[list[list[int]]]:
    """Give each rank the same number of microbatches, balancing tokens: largest first, to the lightest rank."""
    per_rank = len(microbatches) // num_ranks
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    order = sorted(range(len(microbatches)), key=lambda i: (-_load(microbatches[i], lengths), i))
    for i in order:
        open_ranks = (rank for rank in range(num_ranks) if len(ranks[rank]) < per_rank)
        rank = min(open_ranks, key=lambda rank: (loads[rank], rank))
        ranks[rank].append(list(microbatches[i]))
        loads[rank] += _load(microbatches[i], lengths)
    return ranks


def _load(members: Sequence[int], lengths: Mapping[int, int]) -> int:
    return sum(lengths[number] for number in members)


def _halve(members: Sequence[int], lengths: Mapping[int, int]) -> list[list[int]]:
    halves: list[list[int]] = [[], []]
    for number in sorted(members, key=lambda number: (-lengths[number], number)):
        lighter = 0 if _load(halves[0], lengths) <= _load(halves[1], lengths) else 1
        halves[lighter].append(number)
    return halves
