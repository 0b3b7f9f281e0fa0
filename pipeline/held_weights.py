"""A copy of the weights that is published while the next batch changes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

NamedTensors = Iterator[tuple[str, torch.Tensor]]

MARGIN_BYTES = 2 << 30
"""Of a GPU's memory that a copy leaves free."""


class HeldWeights:
    """One rank's part: the whole weights on rank 0, nothing on the others. Its memory is kept for the next version."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._tensors: dict[str, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self.is_held = False

    def fits(self, num_bytes: int) -> bool:
        """Whether there is room for weights of so many bytes."""
        if self._tensors or not torch.cuda.is_available():
            return True
        free, _ = torch.cuda.mem_get_info()
        return num_bytes + MARGIN_BYTES <= free

    @torch.no_grad()
    def hold(self, weights: NamedTensors) -> bool:
        """Copy what rank 0 gets of the weights; every rank iterates to the end. Whether there was memory for it."""
        held: dict[str, torch.Tensor] | None = {}
        for name, tensor in weights:
            if self._rank == 0 and held is not None:
                try:
                    held[name] = _copied(tensor, self._tensors.get(name))
                except torch.OutOfMemoryError:
                    held = None
                    self._tensors = {}
        if held is None:
            return False
        self._tensors = held
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.is_held = True
        return True

    def let_go(self) -> None:
        """The weights are those of the trainer again."""
        self.is_held = False

    def __iter__(self) -> NamedTensors:
        return iter(self._tensors.items())

    @contextmanager
    def beside_training(self) -> Iterator[None]:
        """Work in the body goes on beside the training's, on the same device."""
        device = next((tensor.device for tensor in self._tensors.values() if tensor.is_cuda), None)
        if device is None:
            yield
            return
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            yield


def weights_to_send(held: HeldWeights, gather: Callable[[], NamedTensors]) -> NamedTensors:
    """What is held; else what the trainer's ranks gather together."""
    return iter(held) if held.is_held else gather()


def _copied(tensor: torch.Tensor, earlier: torch.Tensor | None) -> torch.Tensor:
    if earlier is None or (earlier.shape, earlier.dtype, earlier.device) != (tensor.shape, tensor.dtype, tensor.device):
        return tensor.detach().clone()
    return earlier.copy_(tensor)
