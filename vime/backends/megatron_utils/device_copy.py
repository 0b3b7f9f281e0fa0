"""Copies to the training device that nobody waits for."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on `device`, through pinned memory where it is a GPU.

    From other memory a copy waits for all work that the GPU has before it, and the GPU then for the host.
    """
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
