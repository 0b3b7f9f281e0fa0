"""Weights that aren't trained, in host memory beside the model whose place they take for a pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.utils import unwrap_model


class FrozenWeights:
    """A second set of values for the parameters and saved buffers of one rank's model, under any parallel layout.

    They take as much host memory as the rank's model, and one more tensor on the device while they are exchanged.
    Optimizer, gradients and random state are never touched.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        """Begin with a copy of the weights that the chunks of a `Learner` have now."""
        self._chunks = chunks
        self._kept = [_host_copy(tensor) for tensor in _tensors(chunks)]

    def copy_model(self) -> None:
        """Take over the weights that the model has now."""
        with torch.no_grad():
            for tensor, kept in zip(_tensors(self._chunks), self._kept, strict=True):
                kept.copy_(tensor)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has these weights inside, and bit by bit its own again afterwards."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()

    def exchange(self) -> None:
        """Give the model these weights and keep those that it had."""
        with torch.no_grad():
            for tensor, kept in zip(_tensors(self._chunks), self._kept, strict=True):
                before = tensor.clone()
                tensor.copy_(kept, non_blocking=True)
                kept.copy_(before, non_blocking=True)
        torch.cuda.synchronize()


def _tensors(chunks: Sequence[Any]) -> list[torch.Tensor]:
    """Parameters and saved buffers (a router's bias of its experts is one), each once, after pending all-gathers."""
    found: dict[int, torch.Tensor] = {}
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
        for value in unwrap_model(chunk).state_dict(keep_vars=True).values():
            if isinstance(value, torch.Tensor):
                found.setdefault(id(value), value.detach())
    return list(found.values())


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return kept.copy_(tensor)
