"""A Ray cluster of several nodes on this machine, any of which can die."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

import ray
from ray.cluster_utils import Cluster

from pipeline.node_devices import CPU_SLOT

QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 5}
"""Ray notices the death of a node within some seconds."""


class RayNodes:
    """The first node has no device, and drivers connect to it. Use with `with`."""

    def __init__(self) -> None:
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "_system_config": QUICK})
        self._added: dict[str, Any] = {}

    @property
    def address(self) -> str:
        """For `RAY_ADDRESS`."""
        return str(self._cluster.address)

    def add(self, name: str, slots: int) -> None:
        """Add a node with room for so many worker processes."""
        self._added[name] = self._cluster.add_node(
            num_cpus=1, resources={CPU_SLOT: slots}, node_name=name, object_store_memory=80 * 2**20
        )

    def kill(self, name: str) -> None:
        """Kill a node's processes."""
        self._cluster.remove_node(self._added.pop(name), allow_graceful=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._cluster.shutdown()


def wait_for_death(name: str, timeout_s: float = 60.0) -> None:
    """Until Ray knows that a node is dead; for a process that is connected to it."""
    deadline = time.monotonic() + timeout_s
    while any(node["Alive"] and node["NodeName"] == name for node in ray.nodes()):
        assert time.monotonic() < deadline, f"Ray has not noticed the death of {name}"
        time.sleep(0.05)
