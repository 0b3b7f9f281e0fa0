"""What vLLM on a CPU verifies drafts with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vime.backends.vllm_utils.plugin import draft_repair

DRAFTS = torch.tensor([2, 2, 5], dtype=torch.int32)
"""Sums of the numbers of tokens drafted for three requests: 2, 0 and 3."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_a_number_of_a_request_is_that_of_each_token_drafted_for_it(dtype: torch.dtype) -> None:
    numbers = torch.tensor([3, 7, 0], dtype=dtype)
    found = draft_repair.expand_batch_to_tokens(numbers, DRAFTS, 5, replace_from=0, replace_to=1)
    assert found.dtype == dtype
    assert found.tolist() == [3, 3, 1, 1, 1]


@pytest.mark.slow  # it imports vLLM
def test_vllm_divides_the_logits_of_drafted_tokens_by_the_temperature_of_their_request() -> None:
    from vllm.v1.sample.rejection_sampler import apply_sampling_constraints

    draft_repair.install()
    draft_repair.install()
    sampling = SimpleNamespace(
        all_greedy=False, temperature=torch.tensor([0.5, 0.7, 2.0]), top_k=torch.tensor([4, 4, 1]), top_p=None
    )
    found = apply_sampling_constraints(torch.arange(20.0).reshape(5, 4), DRAFTS, sampling)
    wanted = torch.arange(20.0).reshape(5, 4) / torch.tensor([0.5, 0.5, 2.0, 2.0, 2.0])[:, None]
    wanted[2:, :3] = -torch.inf
    assert torch.equal(found, wanted)
