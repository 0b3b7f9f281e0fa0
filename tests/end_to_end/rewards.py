"""A reward with a gradient for a random model: the share of digits in the response."""

from typing import Any

from vime.utils.types import Sample


async def digits(args: Any, sample: Sample) -> float:  # noqa: ARG001 - the documented hook signature
    return sum(character.isdigit() for character in sample.response) / 16
