"""The tool of the `multi_turn_tool` example, and how the model calls it: `(12*34)` is answered by `:0408`."""

from __future__ import annotations

import re

CALL_END = ")"
NUM_DIGITS = 4
"""Of every product, zeros in front."""
NO_ANSWER = ":" + "-" * NUM_DIGITS
_CALL = re.compile(r"\((\d\d)\*(\d\d)\)")


def is_call(turn: str) -> bool:
    """Whether the model wants the tool to answer."""
    return turn.endswith(CALL_END)


def answer(turn: str) -> str:
    """What the tool says to a turn of the model's that is a call."""
    call = _CALL.fullmatch(turn)
    return NO_ANSWER if call is None else f":{int(call[1]) * int(call[2]):0{NUM_DIGITS}d}"
