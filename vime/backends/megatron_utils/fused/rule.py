"""Where fused kernels take the place of PyTorch's operators."""

from __future__ import annotations

import torch

NARROW = (torch.bfloat16, torch.float16)


def runs_fused(tensor: torch.Tensor) -> bool:
    """Whether work on this tensor is fused: on a GPU in half precision. In float32 the plain operators are the model.

    The kernels compute in float32 and round once, at the end.
    """
    return tensor.is_cuda and tensor.dtype in NARROW and tensor.numel() > 0


def fuses_blocks(logits: torch.Tensor) -> bool:
    """Whether a block of the output head's logits, float32 everywhere, goes through fused kernels: on a GPU."""
    return logits.is_cuda


def num_programs(device: torch.device) -> int:
    """Programs that fill a device, for kernels of which each goes over many rows."""
    if device.type != "cuda":  # Triton's interpreter
        return 4
    return 8 * torch.cuda.get_device_properties(device).multi_processor_count
