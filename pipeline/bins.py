"""Sequence packing: which samples share a microbatch. Pure functions on lengths."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence


def best_fit(numbers: Iterable[int], lengths: Mapping[int, int], max_tokens: int) -> list[list[int]]:
    """Best-fit decreasing into bins of at most `max_tokens` tokens; no sample may be longer.

    The longest sample goes first, each to the fullest bin that has room for it; equal ones by number. Uses at most
    11/9 of the fewest bins possible, plus one.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, bin), ascending
    for number in sorted(numbers, key=lambda number: (-lengths[number], number)):
        fit = bisect.bisect_left(rooms, (lengths[number], -1))
        if fit == len(rooms):
            bins.append([number])
            bisect.insort(rooms, (max_tokens - lengths[number], len(bins) - 1))
        else:
            room, chosen = rooms.pop(fit)
            bins[chosen].append(number)
            bisect.insort(rooms, (room - lengths[number], chosen))
    return bins


def raise_count(bins: Sequence[Sequence[int]], lengths: Mapping[int, int], count: int) -> list[list[int]]:
    """The same samples in at least `count` bins: the fullest ones are halved; where none can be, empty ones come."""
    result = [list(members) for members in bins]
    while len(result) < count:
        divisible = [i for i, members in enumerate(result) if len(members) > 1]
        if not divisible:
            result.append([])
            continue
        fullest = max(divisible, key=lambda i: (load(result[i], lengths), -i))
        result.extend(_halve(result.pop(fullest), lengths))
    return result


def load(members: Iterable[int], lengths: Mapping[int, int]) -> int:
    """Tokens of a bin."""
    return sum(lengths[number] for number in members)


def _halve(members: Sequence[int], lengths: Mapping[int, int]) -> list[list[int]]:
    halves: list[list[int]] = [[], []]
    loads = [0, 0]
    for number in sorted(members, key=lambda number: (-lengths[number], number)):
        lighter = 0 if loads[0] <= loads[1] else 1
        halves[lighter].append(number)
        loads[lighter] += lengths[number]
    return halves
