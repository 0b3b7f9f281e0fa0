"""--rollout-data-postprocess-path: a function of the user's own has the last word on a rollout's advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vime.algorithms.objective_config import ObjectiveConfig
from vime.algorithms.ragged import pieces, spread
from vime.backends.megatron_utils.custom_advantages import rollout_data, taken_advantages
from vime.backends.megatron_utils.sequences import lengths_of
from vime.data.batch import PackedMicrobatch
from vime.data.lazy import PreparedMicrobatches, token_counts, without_candidates

FLAG = "--rollout-data-postprocess-path"
Postprocess = Callable[[Any, int, dict[str, Any]], object]
"""`f(args, rollout_id, rollout_data)`, which changes `rollout_data` in place."""


def postprocessed(
    steps: Sequence[Sequence[PackedMicrobatch]], rollout_id: int, config: ObjectiveConfig, function: Postprocess
) -> list[PreparedMicrobatches]:
    """The prepared microbatches with the advantages and returns that the function leaves.

    It is called once with all sequences of the rank, which it sees as a custom advantage function does, together with
    `advantages` and `returns`: for each sequence a float32 tensor with one value for each response token.

    Raises `TrainerError` for other lengths.
    """
    sources = [without_candidates(step) for step in steps]
    data, sizes = rollout_data((batch for step in sources for batch in step), config)
    found = [_advantages(batch) for step in sources for batch in step]
    lengths = data["response_lengths"]
    for number, name in enumerate(("advantages", "returns")):
        data[name] = pieces(torch.cat([pair[number] for pair in found]), lengths)
    function(config.hook_args, rollout_id, data)
    results = iter(
        [
            {"token_advantages": item.advantages.numpy(), "token_returns": item.returns.numpy()}
            for item in taken_advantages(data, sizes, FLAG)
        ]
    )
    return [PreparedMicrobatches(step, [next(results) for _ in token_counts(step)]) for step in steps]


def _advantages(batch: PackedMicrobatch) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages [R], returns [R]) of a microbatch; the plan's, where an estimator didn't tell tokens apart."""
    plain = spread(torch.tensor(batch.advantages), lengths_of(batch))
    advantages, returns = (
        plain if values is None else torch.tensor(values) for values in (batch.token_advantages, batch.token_returns)
    )
    return advantages, returns
