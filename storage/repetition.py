"""Whether a text goes round in circles."""

from __future__ import annotations

import zlib

TAIL_CHARACTERS = 10_000
"""So much of a text's end is looked at."""
FEWEST_CHARACTERS = 1_000
"""A shorter text is no loop: the start of a repetition can't be told from what is merely alike."""
LOOP_RATIO = 10
"""A text that zlib makes so many times smaller is a loop. Prose becomes two to three times smaller, code five times."""


def is_repetitive(text: str) -> bool:
    """Whether the end of `text` repeats itself."""
    if len(text) < FEWEST_CHARACTERS:
        return False
    tail = text[-TAIL_CHARACTERS:].encode(errors="replace")
    return len(tail) >= LOOP_RATIO * len(zlib.compress(tail))
