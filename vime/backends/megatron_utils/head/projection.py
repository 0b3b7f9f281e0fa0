"""Products of hidden states and head weights in the wanted precision, a block at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Projection:
    """Hidden states and the weights of one vocabulary tile as operands of matrix products."""

    hidden: torch.Tensor
    """[R, H]"""
    dtype: torch.dtype
    """Of both operands: float32, or the narrower one of the weights."""

    def logits(self, rows: slice, tile: torch.Tensor, temperature: float) -> torch.Tensor:
        """[r, columns] float32, divided by the temperature; `tile` [columns, H]."""
        logits = (self.hidden[rows] @ tile.t()).float()
        return logits if temperature == 1.0 else logits.div_(temperature)

    def add_hidden_gradient(self, rows: slice, gradient: torch.Tensor, tile: torch.Tensor, to: torch.Tensor) -> None:
        """Add `gradient` [r, columns] times `tile` to those rows of `to` [R, H] float32."""
        if self.dtype == torch.float32:
            to[rows].addmm_(gradient, tile)
        else:
            to[rows] += gradient.to(self.dtype) @ tile

    def add_tile_gradient(self, rows: slice, gradient: torch.Tensor, to: torch.Tensor) -> None:
        """Add `gradient` [r, columns], transposed, times the hidden states to `to` [columns, H] float32."""
        if self.dtype == torch.float32:
            to.addmm_(gradient.t(), self.hidden[rows])
        else:
            to += gradient.to(self.dtype).t() @ self.hidden[rows]


def projection_of(hidden: torch.Tensor, weight: torch.Tensor, *, fp32: bool) -> Projection:
    dtype = torch.float32 if fp32 else weight.dtype
    return Projection(hidden.detach().to(dtype), dtype)
