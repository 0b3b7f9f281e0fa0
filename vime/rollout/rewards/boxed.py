r"""The last `\boxed{...}` of a text."""

from __future__ import annotations

import re

_OPENING = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` or `\fbox{...}` whose braces are balanced; None without one."""
    for opening in reversed(list(_OPENING.finditer(text))):
        depth = 1
        for brace in _BRACE.finditer(text, opening.end()):
            depth += {"{": 1, "}": -1}.get(brace.group(), 0)
            if depth == 0:
                return text[opening.end() : brace.start()]
    return None
