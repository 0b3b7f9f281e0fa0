"""Worker processes that stand for GPUs on a machine without CUDA."""

from __future__ import annotations

import os

from vime.settings.machine import CPU_SLOTS_PER_CORE


def cpu_slots() -> int:
    """Worker processes that this machine is given."""
    return CPU_SLOTS_PER_CORE * (os.cpu_count() or 1)
