"""A reward that fails."""

from typing import Any

from vime.utils.types import Sample


async def refuses(args: Any, sample: Sample) -> float:  # noqa: ARG001 - the documented hook signature
    raise KeyError("no such label")
