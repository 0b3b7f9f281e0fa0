"""The reward of the `reverse` example: 1 for the right five characters and an end of turn, else 0."""

from __future__ import annotations

from vime.errors import RewardError
from vime.utils.types import Sample

END_OF_TURN = "<eos>"


async def exact_match(args: object, sample: Sample) -> float:  # noqa: ARG001
    """Return 1.0 when the model said exactly the label and then ended its turn by itself, else 0.0.

    Raises `RewardError` when the sample's label is not text.
    """
    if not isinstance(sample.label, str):
        raise RewardError(
            f"sample {sample.index} of group {sample.group_index}: label is {sample.label!r}, allowed: text.",
            next_step="Pass --label-key label with the prompts that examples/reverse/prepare.py wrote.",
        )
    finished = sample.status is Sample.Status.COMPLETED
    return float(finished and sample.response.removesuffix(END_OF_TURN) == sample.label)
