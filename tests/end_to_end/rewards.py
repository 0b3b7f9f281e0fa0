"""A reward with a gradient for a random model: the share of digits in the response."""

import asyncio
from typing import Any

from vime.utils.types import Sample


async def digits(args: Any, sample: Sample) -> float:  # noqa: ARG001 - the documented hook signature
    return sum(character.isdigit() for character in sample.response) / 16


async def by_index(args: Any, sample: Sample) -> float:  # noqa: ARG001
    """Differs among the members of a group, whatever they say: a stand-in engine gives all of them the same answer."""
    return float((sample.index or 0) % 3)


async def slow(args: Any, sample: Sample) -> float:
    """Takes five seconds, as a busy judge does."""
    await asyncio.sleep(5)
    return await by_index(args, sample)


async def never(args: Any, sample: Sample) -> float:  # noqa: ARG001
    """Answers to nobody."""
    await asyncio.Event().wait()
    return 0.0
