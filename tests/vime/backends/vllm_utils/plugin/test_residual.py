"""The residual stream in float32 against float64, and where vLLM's normalization uses it."""

from __future__ import annotations

import pytest
import torch

from vime.backends.vllm_utils.plugin import FP32_RESIDUAL_ENV, residual

HIDDEN, EPSILON = 64, 1e-5


def layers(count: int, seed: int) -> list[torch.Tensor]:
    """What layers add to the stream, in bfloat16 [5, HIDDEN]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(5, HIDDEN, generator=generator).bfloat16() for _ in range(count)]


def test_a_small_addition_to_a_large_stream_is_not_rounded_away() -> None:
    first, *added = layers(60, 0)
    stream: torch.Tensor = first * 100
    exact = stream.double()
    weight = torch.linspace(0.5, 2.0, HIDDEN).bfloat16()
    for layer in added:
        found, stream = residual.add_and_normalize(layer, stream, weight, EPSILON)
        exact = exact + layer.double()
        assert (found.dtype, stream.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(stream.double(), exact, rtol=1e-5, atol=1e-4)
    wanted = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + EPSILON) * weight.double()
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=1e-5)


@pytest.mark.slow  # it imports vLLM
def test_vllms_normalization_keeps_the_stream_in_float32_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm

    monkeypatch.setattr(RMSNorm, "forward_native", RMSNorm.forward_native)
    first, layer = layers(2, 1)
    with set_current_vllm_config(VllmConfig()):
        norm = RMSNorm(HIDDEN, EPSILON, dtype=torch.bfloat16)
    residual.install()
    assert norm.forward_cpu(layer.clone(), first.clone())[1].dtype == torch.bfloat16
    monkeypatch.setenv(FP32_RESIDUAL_ENV, "1")
    residual.install()
    residual.install()
    found, stream = norm.forward_cpu(layer, first)
    assert (found.dtype, stream.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(stream, first.float() + layer.float())
    assert norm.forward_cpu(layer).dtype == torch.bfloat16, "without a stream there is nothing to keep"
