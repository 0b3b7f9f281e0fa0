"""The reward of the `multi_turn_tool` example: 1 for the right product in the last turn, and nothing after it."""

from __future__ import annotations

from vime.utils.types import Sample

END_OF_TURN = "<eos>"


async def right_product(args: object, sample: Sample) -> float:  # noqa: ARG001
    """1.0 when the model ended its last turn by itself, and the turn is exactly the label; else 0.0."""
    last_turn = sample.response.removesuffix(END_OF_TURN).rpartition("=")[2]
    return float(sample.status is Sample.Status.COMPLETED and last_turn == sample.label)
