"""Repair for latent attention on a CPU.

vLLM 0.32's rotary kernel for CPUs takes queries and keys as [T, heads x size]. Given [T, heads, size], as latent
attention gives them, it takes the heads for tokens and rotates most of them wrongly, without an error. Such tensors are
rotated by vLLM's plain tensor operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

_MARK = "vime_repaired"

Rotated = tuple[torch.Tensor, torch.Tensor | None]


def install() -> None:
    """Extend vLLM's class in this process; may be called more than once."""
    if not hasattr(RotaryEmbedding.forward_cpu, _MARK):
        RotaryEmbedding.forward_cpu = _by_shape(RotaryEmbedding.forward_cpu)


def _by_shape(kernel: Callable[..., Rotated]) -> Callable[..., Rotated]:
    @functools.wraps(kernel)
    def forward_cpu(rotary: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        is_flat = query.dim() == 2 and (key is None or key.dim() == 2)
        return (kernel if is_flat else RotaryEmbedding.forward_native)(rotary, positions, query, key)

    setattr(forward_cpu, _MARK, True)
    return forward_cpu
