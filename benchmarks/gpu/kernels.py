"""Where the time of a piece of work goes: the kernels of a GPU, or torch's operators on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

KINDS: Mapping[str, tuple[str, ...]] = {
    "attention": ("flash", "attention", "fmha"),
    "products": ("gemm", "nvjet", "cutlass", "::mm", "::addmm", "::bmm"),
    "copies": ("memcpy", "memset", "::copy_", "direct_copy"),
}
"""Parts of names; what has none of them is called `rest`."""
MOST_ROWS = 60


def seconds_by_kind(work: Callable[[], object], table: Path) -> dict[str, float]:
    """Seconds of each kind of kernel in one run of `work`; the longest kernels are written to `table`."""
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as found:
        work()
        if on_gpu:
            torch.cuda.synchronize()
    averages = found.key_averages()
    order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    table.write_text(averages.table(sort_by=order, row_limit=MOST_ROWS, max_name_column_width=90))
    seconds = dict.fromkeys([*KINDS, "rest"], 0.0)
    for event in averages:
        if on_gpu and event.device_type == DeviceType.CUDA:
            seconds[kind_of(event.key)] += event.self_device_time_total / 1e6
        elif not on_gpu:
            seconds[kind_of(event.key)] += event.self_cpu_time_total / 1e6
    return seconds


def kind_of(kernel: str) -> str:
    """By its name."""
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "rest")
