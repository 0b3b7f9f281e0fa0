"""What this machine has, found without loading CUDA."""

from __future__ import annotations

import os
from pathlib import Path

DEVICE_FOLDER = Path("/dev")
CPU_SLOTS_PER_CORE = 4
"""Worker processes that may stand for GPUs on one core, without CUDA."""


def visible_gpus() -> int:
    """GPUs of this machine that CUDA would show, without loading CUDA."""
    devices = len([path for path in DEVICE_FOLDER.glob("nvidia[0-9]*") if path.name[6:].isdigit()])
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return devices
    return min(devices, len([name for name in chosen.split(",") if name.strip() not in ("", "-1")]))


def cpu_slots() -> int:
    """Worker processes that stand for GPUs on this machine when it has no CUDA."""
    return CPU_SLOTS_PER_CORE * (os.cpu_count() or 1)
