"""--rollout-function-path vime.rollout.fully_async_rollout.generate_rollout_fully_async: engines never wait."""

from __future__ import annotations

from typing import Any

from vime.rollout.base_types import RolloutFnTrainOutput
from vime.rollout.collected_output import as_output
from vime.rollout.rollout_call import current_rollout


def generate_rollout_fully_async(
    args: Any,
    rollout_id: int,  # noqa: ARG001 - the documented signature
    data_source: Any,
    evaluation: bool = False,
) -> RolloutFnTrainOutput:
    """`args.rollout_batch_size` groups in the order in which they were finished, while others are in work all the time.

    Named by the flag, this is vime's own stream, where no rollout has a beginning or an end. Raises `ValueError` for
    an evaluation.
    """
    if evaluation:
        raise ValueError("generate_rollout_fully_async makes no evaluation; --eval-function-path names what does")
    call, size = current_rollout(), args.rollout_batch_size
    collected = call.run(call.collector.collect(data_source, size, pull=size, runs_ahead=True))
    return as_output(args, collected, data_source)
