"""A node of a Ray cluster dies under a run: what ran there starts where there is room, or is told to have none."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.cluster import Cluster, answer
from tests.support.node_namer import NodeNamer
from tests.support.ray_nodes import RayNodes, wait_for_death
from vime.errors import ProcessDiedError, RunFailedError
from vime.settings.placement import Demand

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayNodes]:
    with RayNodes() as made:
        monkeypatch.setenv("RAY_ADDRESS", made.address)
        yield made


def test_what_a_lost_node_held_starts_on_nodes_with_room_and_without_room_the_missing_piece_is_named(
    nodes: RayNodes,
) -> None:
    nodes.add("first", 3)
    with Cluster(Demand((2,), (1,)), 0, room_s=0.5) as cluster:
        rank = cluster.spawn_worker(NodeNamer, 1)
        assert asyncio.run(told(rank)) == "first"
        assert asyncio.run(cluster.leave_lost_nodes()) == "", "nothing is lost"
        nodes.add("second", 2)
        nodes.kill("first")
        wait_for_death("first")
        with pytest.raises(ProcessDiedError, match=r"trainer rank 1 died\..* node"):
            asyncio.run(told(rank))
        with pytest.raises(ProcessDiedError, match="trainer rank 1 died"):
            asyncio.run(told(cluster.spawn_worker(NodeNamer, 1)))
        moved = asyncio.run(cluster.leave_lost_nodes())
        assert moved == "Lost from the Ray cluster: first. Started on second instead: trainer ranks 0, 1."
        assert asyncio.run(told(cluster.spawn_worker(NodeNamer, 1))) == "second"
        no_room = r"\(first\) left .* engine 0\. .* there are .*0 free of 2 on second.* Engine 1 of 1 with 1 GPU fin"
        with pytest.raises(RunFailedError, match=no_room):
            asyncio.run(cluster.leave_lost_nodes(0))
        nodes.add("third", 1)
        moved = asyncio.run(cluster.leave_lost_nodes(0))
        assert moved == "Lost from the Ray cluster: first. Started on third instead: engine 0."
        assert asyncio.run(told(cluster.spawn_worker(NodeNamer, 2))) == "third"


async def told(actor: Any) -> str:
    name: str = await answer(actor.name.remote(), "trainer rank 1", within_s=60)
    return name
