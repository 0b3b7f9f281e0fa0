"""Worker processes that stand for GPUs on a machine without CUDA."""

from __future__ import annotations

import os

CPU_SLOTS_PER_CORE = 4


def cpu_slots() -> int:
    """Worker processes that this machine is given."""
    return CPU_SLOTS_PER_CORE * (os.cpu_count() or 1)
