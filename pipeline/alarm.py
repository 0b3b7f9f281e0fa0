"""One thing that is wrong with a run."""

from __future__ import annotations

import msgspec

MOST_LEVEL = 1e6


class Alarm(msgspec.Struct, frozen=True):
    """Something that is past its threshold, or that has failed."""

    name: str
    """A word: ended, engine, stall, gap, prefix, reward, staleness, replay, failures, truncation, entropy, signal,
    numbers, disk, batch, records."""
    text: str
    """What was found, and the threshold."""
    what_to_do: str
    level: float = 1.0
    """How many times past its threshold; comparable between alarms of one name."""

    def __str__(self) -> str:
        return f"{self.name}: {self.text} {self.what_to_do}".rstrip()


def level_above(value: float, limit: float) -> float:
    """Of a value that should stay below the limit."""
    return min(value / limit, MOST_LEVEL) if limit > 0 else MOST_LEVEL


def level_below(value: float, limit: float) -> float:
    """Of a value that should stay above the limit."""
    return min(limit / value, MOST_LEVEL) if value > 0 else MOST_LEVEL
