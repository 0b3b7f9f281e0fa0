"""What decides in which order and with which instructions numbers are added."""

from __future__ import annotations

import argparse
from typing import Any

import torch


def numeric_layout(args: argparse.Namespace, num_threads: int | None) -> dict[str, str | int]:
    """Parallel sizes, threads, device and torch of this rank, by name."""
    values: dict[str, Any] = vars(args)
    sizes = {
        "ranks": "world_size",
        "tensor": "tensor_model_parallel_size",
        "pipeline": "pipeline_model_parallel_size",
        "context": "context_parallel_size",
        "expert": "expert_model_parallel_size",
    }
    on_gpu = torch.cuda.is_available()
    return {
        **{name: int(values[field]) for name, field in sizes.items()},
        "threads": torch.get_num_threads() if num_threads is None else num_threads,
        "device": torch.cuda.get_device_name() if on_gpu else f"cpu {torch.backends.cpu.get_cpu_capability()}",
        "torch": str(torch.__version__),
    }
