"""The residual stream in float32, in models that otherwise compute in bfloat16 on a CPU.

Every layer adds its output to the stream. Rounded to bfloat16 each time, the stream is the largest part of what the
engine's log-probabilities are off: its numbers are large beside what a layer adds.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from vime.backends.vllm_utils.plugin import FP32_RESIDUAL_ENV

_MARK = "vime_fp32_residual"

Norm = Callable[..., Any]


def install() -> None:
    """Extend vLLM's normalization in this process, on a CPU, where it is asked for; may be called more than once."""
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.platforms import current_platform

    if os.environ.get(FP32_RESIDUAL_ENV) and current_platform.is_cpu() and not hasattr(RMSNorm.forward_native, _MARK):
        RMSNorm.forward_native = _adding_in_float32(RMSNorm.forward_native)


def _adding_in_float32(stock: Norm) -> Norm:
    @functools.wraps(stock)
    def forward_native(norm: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None or x.dtype == torch.float32 or norm.variance_size_override is not None:
            return stock(norm, x, residual)
        weight = norm.weight.data if norm.has_weight else None
        return add_and_normalize(x, residual, weight, norm.variance_epsilon)

    setattr(forward_native, _MARK, True)
    return forward_native


def add_and_normalize(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalized sum in the dtype of `x` [..., H], rounded once, and the sum in float32, the next residual."""
    stream = x.float() + residual
    scaled = stream * torch.rsqrt(stream.square().mean(dim=-1, keepdim=True) + epsilon)
    return (scaled if weight is None else scaled * weight.float()).to(x.dtype), stream
