"""A node of a Ray cluster dies under a run: what ran there starts where there is room, or is told to have none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster

from pipeline.cluster import Cluster, answer
from pipeline.node_devices import CPU_SLOT
from tests.support.node_namer import NodeNamer
from vime.errors import ProcessDiedError, RunFailedError
from vime.settings.placement import Demand

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]

QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 5}
"""Ray notices the death of a node soon."""


class Nodes:
    """A cluster whose driver's node has no device."""

    def __init__(self) -> None:
        self.ray = RayCluster(initialize_head=True, head_node_args={"num_cpus": 1, "_system_config": QUICK})
        self._added: dict[str, Any] = {}

    def add(self, name: str, slots: int) -> None:
        self._added[name] = self.ray.add_node(
            num_cpus=1, resources={CPU_SLOT: slots}, node_name=name, object_store_memory=80 * 2**20
        )

    def kill(self, name: str) -> None:
        """Kill a node's processes, and wait until Ray knows."""
        self.ray.remove_node(self._added.pop(name), allow_graceful=False)
        deadline = time.monotonic() + 30
        while any(node["Alive"] and node["NodeName"] == name for node in ray.nodes()):
            assert time.monotonic() < deadline, "Ray has not noticed"
            time.sleep(0.05)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    made = Nodes()
    monkeypatch.setenv("RAY_ADDRESS", made.ray.address)
    try:
        yield made
    finally:
        made.ray.shutdown()


def test_what_a_lost_node_held_starts_on_nodes_with_room_and_without_room_the_missing_piece_is_named(
    nodes: Nodes,
) -> None:
    nodes.add("first", 3)
    with Cluster(Demand((2,), (1,)), 0, room_s=0.5) as cluster:
        rank = cluster.spawn_worker(NodeNamer, 1)
        assert asyncio.run(told(rank)) == "first"
        assert cluster.leave_lost_nodes() == "", "nothing is lost"
        nodes.add("second", 2)
        nodes.kill("first")
        with pytest.raises(ProcessDiedError, match=r"trainer rank 1 died\..* node"):
            asyncio.run(told(rank))
        with pytest.raises(ProcessDiedError, match="trainer rank 1 died"):
            asyncio.run(told(cluster.spawn_worker(NodeNamer, 1)))
        moved = "Lost from the Ray cluster: first. Started on second instead: trainer ranks 0, 1."
        assert cluster.leave_lost_nodes() == moved
        assert asyncio.run(told(cluster.spawn_worker(NodeNamer, 1))) == "second"
        no_room = r"\(first\) left .* engine 0\. .* there are .*0 free of 2 on second\. Engine 1 of 1 with 1 GPUs fin"
        with pytest.raises(RunFailedError, match=no_room):
            cluster.leave_lost_nodes(0)
        nodes.add("third", 1)
        assert cluster.leave_lost_nodes(0) == "Lost from the Ray cluster: first. Started on third instead: engine 0."
        assert asyncio.run(told(cluster.spawn_worker(NodeNamer, 2))) == "third"


async def told(actor: Any) -> str:
    name: str = await answer(actor.name.remote(), "trainer rank 1", within_s=60)
    return name
