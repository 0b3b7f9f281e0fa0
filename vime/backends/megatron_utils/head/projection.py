"""Products of hidden states and head weights in the wanted precision, a block at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vime.backends.megatron_utils.fused.rule import has_kernels

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

    def add_gradients(
        self,
        rows: slice,
        gradient: torch.Tensor | Bf16Parts,
        tile: torch.Tensor,
        *,
        to_hidden: torch.Tensor | None,
        to_tile: torch.Tensor | None,
    ) -> None:
        """Add the `gradient` [r, columns] of a block of logits, float32, to what depends on it, where wanted.

        Times `tile` to those rows of `to_hidden` [R, H]; transposed, times the hidden states to `to_tile` [columns, H];
        both float32. Parts are for where `takes_parts`.
        """
        hidden = self.hidden[rows]
        if isinstance(gradient, torch.Tensor) and self.takes_parts(tile):
            gradient = Bf16Parts(bf16_parts(gradient))
        if isinstance(gradient, Bf16Parts):
            parts = gradient.parts
            if to_hidden is not None:
                for part in parts.chunk(2):
                    _add_narrow_product(part, tile, to=to_hidden[rows])
            if to_tile is not None:
                _add_narrow_product(parts.t(), hidden.repeat(2, 1), to=to_tile)
            return
        gradient, hidden, tile = gradient.to(self.dtype), hidden.to(self.dtype), tile.to(self.dtype)
        if to_hidden is not None:
            _add_product(gradient, tile, to=to_hidden[rows])
        if to_tile is not None:
            _add_product(gradient.t(), hidden, to=to_tile)

    def takes_parts(self, weight: torch.Tensor) -> bool:
        """Whether gradients are multiplied as two parts in bfloat16."""
        narrow = self.hidden.dtype == weight.dtype == torch.bfloat16
        return self.dtype == torch.float32 and self.hidden.is_cuda and narrow


@dataclass(frozen=True)
class Bf16Parts:
    """A block of gradients as two numbers for each."""

    parts: torch.Tensor
    """See `bf16_parts`."""


def bf16_parts(values: torch.Tensor) -> torch.Tensor:
    """[2 r, columns] bfloat16 for `values` [r, columns] float32: rounded, then what the rounding left, rounded.

    The sum of both is off by at most 2**-16 of a value; products with them are made many times as fast as in float32.
    """
    if has_kernels(values):
        from vime.backends.megatron_utils.fused.softmax import parts_of

        return parts_of(values)
    num_rows = len(values)
    parts = values.new_empty((2 * num_rows, values.size(1)), dtype=torch.bfloat16)
    parts[:num_rows] = values
    torch.sub(values, parts[:num_rows], out=parts[num_rows:])
    return parts


def _add_narrow_product(left: torch.Tensor, right: torch.Tensor, to: torch.Tensor) -> None:
    """Of bfloat16 to float32, on a GPU."""
    torch.addmm(to, left, right, out_dtype=torch.float32, out=to)


def _add_product(left: torch.Tensor, right: torch.Tensor, to: torch.Tensor) -> None:
    if left.dtype == to.dtype:
        to.addmm_(left, right)
    else:
        to += left @ right


def projection_of(hidden: torch.Tensor, weight: torch.Tensor, *, fp32: bool) -> Projection:
    return Projection(hidden.detach(), torch.float32 if fp32 else weight.dtype)
