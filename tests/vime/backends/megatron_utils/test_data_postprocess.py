"""A function of the user's own has the last word on a rollout's advantages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.vime.backends.megatron_utils.test_token_advantages import STEPS
from vime.algorithms.objective_config import Estimator, ObjectiveConfig
from vime.algorithms.ragged import on_one_rank
from vime.backends.megatron_utils.advantages import with_token_advantages
from vime.backends.megatron_utils.data_postprocess import postprocessed
from vime.errors import TrainerError


@pytest.mark.parametrize("tells_tokens_apart", [False, True])
def test_the_function_sees_the_advantages_and_what_it_leaves_is_trained(tells_tokens_apart: bool) -> None:
    config = ObjectiveConfig(estimator=Estimator.REINFORCE_PLUS_PLUS if tells_tokens_apart else Estimator.GRPO)
    config = ObjectiveConfig(estimator=config.estimator, hook_args="args")
    steps = with_token_advantages(STEPS, config, on_one_rank) if tells_tokens_apart else STEPS
    seen: list[Any] = []

    def halve(args: Any, rollout_id: int, data: dict[str, Any]) -> None:
        seen.append((args, rollout_id, data["sample_indices"]))
        assert [len(values) for values in data["advantages"]] == data["response_lengths"]
        data["advantages"] = [values / 2 for values in data["advantages"]]

    found = postprocessed(steps, 7, config, halve)
    assert seen == [("args", 7, [100, 101, 200, 300, 301])]
    for before, after in zip(steps, found, strict=True):
        for batch, changed in zip(before, after, strict=True):
            lengths = torch.tensor(batch.response_lengths)
            plain = torch.repeat_interleave(torch.tensor(batch.advantages), lengths)
            expected = plain if batch.token_advantages is None else torch.tensor(batch.token_advantages)
            assert changed.token_advantages is not None
            assert torch.equal(torch.tensor(changed.token_advantages), expected / 2)
            assert changed.token_returns is not None
            assert (changed.loss_mask == batch.loss_mask).all()


def test_lengths_that_do_not_fit_are_refused_by_name() -> None:
    def cut(args: Any, rollout_id: int, data: dict[str, Any]) -> None:  # noqa: ARG001
        data["returns"] = [values[1:] for values in data["returns"]]

    with pytest.raises(TrainerError, match=r"--rollout-data-postprocess-path left rollout_data\['returns'\]"):
        postprocessed(STEPS, 0, ObjectiveConfig(), cut)
