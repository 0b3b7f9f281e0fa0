"""An actor that says on which node it runs."""

from __future__ import annotations

import ray


class NodeNamer:
    """In a module of its own, since Ray's workers import it by name."""

    async def name(self) -> str:
        """Name of its node."""
        here = ray.get_runtime_context().get_node_id()
        return str(next(node["NodeName"] for node in ray.nodes() if node["NodeID"] == here))
