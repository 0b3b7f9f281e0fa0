"""Values inside the flags that are passed on to others. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def passed_value(words: Sequence[str], flag: str) -> str | None:
    """Value of the last `flag VALUE` or `flag=VALUE` in `words`; None when it isn't there."""
    found = None
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == flag:
            following = words[position + 1] if position + 1 < len(words) else ""
            found = value if equals else following
    return found
