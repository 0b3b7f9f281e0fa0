"""The reward of the `smollm2` example: 1 where the last number of the answer is the sum that was asked for."""

from __future__ import annotations

import re

from vime.utils.types import Sample


async def right_sum(args: object, sample: Sample) -> float:  # noqa: ARG001
    """1.0 or 0.0."""
    numbers = re.findall(r"\d+", sample.response)
    return float(bool(numbers) and numbers[-1] == sample.label)
