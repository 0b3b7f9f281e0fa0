"""The search for the most probable tokens against `torch.topk` and a stable sort."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime.backends.vllm_utils.plugin import top_k as searched
from vime.backends.vllm_utils.plugin.top_k import top_k


def numbers(rows: int, columns: int, levels: int | None, seed: int) -> torch.Tensor:
    """Log-probabilities; with `levels`, of so many different values."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(rows, columns, generator=generator)
    if levels is not None:
        found = (found * levels / 8).round()
    return found.log_softmax(-1)


@given(
    rows=st.integers(1, 20),
    shape=st.sampled_from([(7, 7), (40, 1), (1024, 128), (1500, 20), (9000, 3), (5003, 128)]),
    levels=st.sampled_from([None, 8, 40, 4000]),
    seed=st.integers(0, 1000),
)
def test_values_are_those_of_torch_and_equal_ones_come_in_the_order_of_their_columns(
    rows: int, shape: tuple[int, int], levels: int | None, seed: int
) -> None:
    columns, k = shape
    values = numbers(rows, columns, levels, seed)
    largest, ids = top_k(values, k)
    assert torch.equal(largest, torch.topk(values, k, dim=-1).values)
    assert torch.equal(values.gather(1, ids.long()), largest)
    assert all(len(set(row)) == k for row in ids.tolist())
    if levels is None:
        assert torch.equal(ids.long(), values.sort(dim=-1, descending=True, stable=True).indices[:, :k])


def test_equal_values_at_the_end_are_those_of_the_lowest_columns() -> None:
    values = numbers(16, 1024, 400, 0)
    _, ids = top_k(values, 128)
    assert torch.equal(ids.long(), values.sort(dim=-1, descending=True, stable=True).indices[:, :128])


@pytest.mark.parametrize("outlier", [float("-inf"), float("inf"), 0.0, -0.0, 3.0, float("nan")])
def test_numbers_that_are_no_usual_log_probability_are_found_as_by_torch(outlier: float) -> None:
    values = numbers(4, 1024, None, 0)
    values[1, 5:900] = outlier
    values[2, 7] = outlier
    largest, ids = top_k(values, 128)
    wanted = torch.topk(values, 128, dim=-1).values
    torch.testing.assert_close(largest, wanted, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(values.gather(1, ids.long()), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("vocab_size", [1024, 9000])
def test_common_batches_are_searched_without_torch(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise AssertionError("torch.topk was called")

    values = numbers(16, vocab_size, None, 0)
    monkeypatch.setattr(searched.torch, "topk", refuse)
    top_k(values, 128)
    top_k(values.bfloat16().float(), 20)  # whose neighbours are often equal


@pytest.mark.slow  # it imports vLLM
def test_vllms_sampler_gathers_the_same_numbers_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.sample.sampler import Sampler

    monkeypatch.setattr(torch._dynamo.config, "disable", True)
    searched.install()
    searched.install()
    for rows in (2, 32):
        values, sampled = numbers(rows, 1024, None, 1), torch.arange(rows)
        found = Sampler.gather_logprobs(values, 20, sampled)
        wanted = Sampler.gather_logprobs.__wrapped__(values, 20, sampled)
        assert (found.logprob_token_ids.dtype, found.logprobs.dtype) == (torch.int32, torch.float32)
        for one, other in zip(found[:3], wanted[:3], strict=True):
            assert torch.equal(one, other)
