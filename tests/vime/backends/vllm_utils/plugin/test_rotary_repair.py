"""Rotation by vLLM on a CPU, in the shapes that its models use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow  # it imports vLLM

T, HEADS, SIZE = 7, 3, 64


@pytest.fixture(scope="module")
def rotary() -> Any:
    """Neighbouring numbers are rotated together, as latent attention does."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    from vime.backends.vllm_utils.plugin import rotary_repair

    rotary_repair.install()
    rotary_repair.install()
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    with set_current_vllm_config(VllmConfig()):
        return get_rope(SIZE, max_position=T, rope_parameters=rope, is_neox_style=False, dtype=torch.float32)


def rotated(vectors: torch.Tensor) -> torch.Tensor:
    """[T, heads, size] float32, at the positions 0 to T - 1."""
    angles = torch.outer(torch.arange(T), 10000.0 ** (-torch.arange(0, SIZE, 2) / SIZE))
    pairs = torch.view_as_complex(vectors.reshape(T, -1, SIZE // 2, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).reshape(vectors.shape)


@pytest.mark.parametrize("is_flat", [True, False])
def test_queries_and_keys_are_rotated_whether_heads_are_a_dimension_or_not(rotary: Any, is_flat: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(T, HEADS, SIZE + 16, generator=generator)[..., 16:]
    key = torch.randn(T, 1, SIZE, generator=generator)
    wanted = rotated(query), rotated(key)
    given = (query.flatten(1), key.flatten(1)) if is_flat else (query, key)
    found = rotary.forward_cpu(torch.arange(T), *given)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.reshape(other.shape), other, atol=1e-5, rtol=0)
