"""Adam without memory: each step is the first step of Adam (--use-stateless-adam)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class StatelessAdam(torch.optim.Optimizer):
    """Moves each weight by lr * g / (|g| + eps), which is what Adam does in its first step, and keeps nothing.

    Weight decay is Adam's (`decoupled=False`: added to the gradient) or AdamW's.
    """

    def __init__(self, param_groups: list[dict[str, Any]], *, decoupled: bool) -> None:
        """Take groups with params, lr, eps and weight_decay, as they are."""
        super().__init__([torch.zeros(0)], {})
        self.param_groups = param_groups  # shards of the distributed optimizer are views, which torch would refuse
        self._decoupled = decoupled

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step; `closure` computes the loss again, as with other optimizers."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            lr, decay = group["lr"], group["weight_decay"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if decay and self._decoupled:
                    parameter.mul_(1 - lr * decay)
                elif decay:
                    gradient = gradient.add(parameter, alpha=decay)
                parameter.addcdiv_(gradient, gradient.abs().add_(group["eps"]), value=-lr)
        return loss
