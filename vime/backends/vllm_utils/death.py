"""Processes that end with their parent, even when the parent is killed with SIGKILL (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

DIE_WITH_PARENT_ENV = "VIME_ENGINE_DIES_WITH_PARENT"
"""Set by the launcher in an engine's environment; read by the plug-in in every process of the engine."""

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends; ends at once if it has ended.

    Call it in processes whose parent starts them from its main thread only.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent or parent == 1:
        os.kill(os.getpid(), signal.SIGKILL)
