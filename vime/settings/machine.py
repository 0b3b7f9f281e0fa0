"""What the rules need to know of the machine, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Node:
    """One machine of the cluster: how many GPUs it has free, or worker processes that stand for them."""

    name: str
    gpus: int
    in_use: int = 0
    """GPUs that it has besides, for others."""

    def __str__(self) -> str:
        return (
            f"{self.gpus} free of {self.gpus + self.in_use} on {self.name}"
            if self.in_use
            else f"{self.gpus} on {self.name}"
        )


@dataclass(frozen=True)
class Machine:
    """The cluster as far as it is known.

    `nodes` None: placement is not checked; `vllm_version` None: the engine's capabilities are not checked;
    `environment` is what engines inherit.
    """

    nodes: tuple[Node, ...] | None = None
    vllm_version: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def has_gpus(device_folder: Path = Path("/dev")) -> bool:
    """Whether this machine has GPUs of NVIDIA; CUDA is not loaded."""
    return any(path.name.removeprefix("nvidia").isdigit() for path in device_folder.glob("nvidia*"))
