"""A copy of the weights that is published while the next batch changes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

NamedTensors = Iterator[tuple[str, torch.Tensor]]

MARGIN_BYTES = 2 << 30
"""Of a GPU's memory that a copy leaves free."""

PARTS_ON_THE_WAY = 3
"""Of a publication: one that is gathered, one that is sent, one that is verified."""


class HeldWeights:
    """One rank's part: the whole weights on rank 0, nothing on the others. They have memory from `hold` to `let_go`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._tensors: dict[str, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self.is_held = False

    def fits(self, num_bytes: int, largest_part: int = 0) -> bool:
        """Whether there is room for so many bytes of weights, and for parts of them that are on their way."""
        if not torch.cuda.is_available():
            return True
        free, _ = torch.cuda.mem_get_info()
        free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return num_bytes + MARGIN_BYTES + PARTS_ON_THE_WAY * largest_part <= free

    @torch.no_grad()
    def hold(self, weights: NamedTensors) -> bool:
        """Copy what rank 0 gets of the weights; every rank iterates to the end. Whether there was memory for it."""
        held: dict[str, torch.Tensor] | None = {}
        for name, tensor in weights:
            if self._rank == 0 and held is not None:
                try:
                    held[name] = tensor.detach().clone()
                except torch.OutOfMemoryError:
                    held = None
        if held is None:
            return False
        self._tensors = held
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.is_held = True
        return True

    def let_go(self) -> None:
        """The weights are those of the trainer again, and the copy's memory is free."""
        self.is_held = False
        if self._stream is not None:
            self._stream.synchronize()
        self._tensors = {}

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
