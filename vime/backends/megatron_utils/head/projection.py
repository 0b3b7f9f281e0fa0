"""Products of hidden states and head weights in the wanted precision, a block at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Projection:
    """Hidden states in front of the head; tiles of the head's weights [columns, H] come as they are stored."""

    hidden: torch.Tensor
    """[R, H]"""
    dtype: torch.dtype
    """Precision of every product: float32, or the weights' own."""

    def logits(self, rows: slice, tile: torch.Tensor, temperature: float) -> torch.Tensor:
        """[r, columns] float32, divided by the temperature."""
        hidden = self.hidden[rows]
        if self.dtype == torch.float32 and hidden.is_cuda and hidden.dtype == tile.dtype in _NARROW:
            # Products of two narrow numbers are exact in float32 and summed there: as exact, and ten times as fast
            logits = torch.mm(hidden, tile.t(), out_dtype=torch.float32)
        else:
            logits = (hidden.to(self.dtype) @ tile.to(self.dtype).t()).float()
        return logits if temperature == 1.0 else logits.div_(temperature)

    def add_hidden_gradient(self, rows: slice, gradient: torch.Tensor, tile: torch.Tensor, to: torch.Tensor) -> None:
        """Add `gradient` [r, columns] times `tile` to those rows of `to` [R, H] float32."""
        if self.dtype == torch.float32:
            to[rows].addmm_(gradient, tile.float())
        else:
            to[rows] += gradient.to(self.dtype) @ tile

    def add_tile_gradient(self, rows: slice, gradient: torch.Tensor, to: torch.Tensor) -> None:
        """Add `gradient` [r, columns], transposed, times the hidden states to `to` [columns, H] float32."""
        hidden = self.hidden[rows].to(self.dtype)
        if self.dtype == torch.float32:
            to.addmm_(gradient.t(), hidden)
        else:
            to += gradient.to(self.dtype).t() @ hidden


def projection_of(hidden: torch.Tensor, weight: torch.Tensor, *, fp32: bool) -> Projection:
    return Projection(hidden.detach(), torch.float32 if fp32 else weight.dtype)
