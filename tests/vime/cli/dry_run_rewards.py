"""A reward that fails, and a sample hook."""

from typing import Any

from vime.utils.types import Sample


async def refuses(args: Any, sample: Sample) -> float:  # noqa: ARG001 - the documented hook signature
    raise KeyError("no such label")


def on_sample(args: Any, sample: Sample, *, rollout_id: int, evaluation: bool) -> None:
    """Does nothing."""


async def too_few(args: Any, samples: list[Sample]) -> list[float]:  # noqa: ARG001 - the documented hook signature
    """A reward of whole groups that forgets its samples."""
    return []
