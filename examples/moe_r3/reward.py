"""The reward of the `moe_r3` example: the share of an answer that is digits, which random weights earn some of."""

from __future__ import annotations

from vime.utils.types import Sample


async def digit_share(args: object, sample: Sample) -> float:  # noqa: ARG001
    """Digits among the characters of the response, over its number of tokens: 0 to 1."""
    return sum(character.isdigit() for character in sample.response) / max(1, sample.response_length)
