"""Where fused kernels take the place of PyTorch's operators."""

from __future__ import annotations

import torch

NARROW = (torch.bfloat16, torch.float16)


def has_kernels(tensor: torch.Tensor) -> bool:
    """Whether the tensor lies where the kernels run: on a GPU."""
    return tensor.is_cuda


def runs_fused(tensor: torch.Tensor) -> bool:
    """Whether work on a model's numbers is fused: on a GPU in half precision. In float32 the plain operators are the
    reference. The kernels compute in float32 and round once, at the end.
    """
    return has_kernels(tensor) and tensor.dtype in NARROW and tensor.numel() > 0


def num_programs(device: torch.device) -> int:
    """Programs that fill a device, for kernels of which each goes over many rows."""
    if device.type != "cuda":  # Triton's interpreter
        return 4
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count
