"""A number with its noun, for messages."""

from __future__ import annotations

_IRREGULAR = {
    "process": "processes",
    "batch": "batches",
    "is": "are",
    "was": "were",
    "has": "have",
    "comes": "come",
    "waits": "wait",
}


def counted(number: int, noun: str) -> str:
    """`1 group`, `2 groups`, `9 worker processes`."""
    return f"{number} {agreeing(number, noun)}"


def agreeing(number: float, word: str) -> str:
    """The noun (`group`, `worker process`) or verb (`is`, `has`) in the form that goes with a number."""
    if number == 1:
        return word
    before, blank, last = word.rpartition(" ")
    return before + blank + _IRREGULAR.get(last, f"{last}s")
