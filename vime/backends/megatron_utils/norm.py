"""RMSNorm without Transformer Engine or Apex."""

from __future__ import annotations

from typing import Any

import torch


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm that also works under sequence parallelism.

    Takes and returns [..., hidden_size]. Megatron-Core's own torch norm refuses sequence parallelism; here the weight
    is marked instead, so that Megatron sums its gradient over the tensor-parallel group.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        if config.sequence_parallel:
            self.weight.sequence_parallel = True  # type: ignore[attr-defined,unused-ignore]
