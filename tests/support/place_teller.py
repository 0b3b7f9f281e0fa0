"""An actor that says where it runs and what it sees."""

from __future__ import annotations

import os

import ray


class PlaceTeller:
    """In a module of its own, since Ray's workers import it by name."""

    async def tell(self) -> tuple[str, list[str]]:
        """Name of its node, and the devices that CUDA would show."""
        here = ray.get_runtime_context().get_node_id()
        name = next(node["NodeName"] for node in ray.nodes() if node["NodeID"] == here)
        return name, os.environ["CUDA_VISIBLE_DEVICES"].split(",")
