"""Processes of a run on the nodes of a Ray cluster that it joins: each where its devices are, and seeing no others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from ray.cluster_utils import Cluster as RayCluster

from pipeline.cluster import Cluster
from pipeline.node_devices import live_nodes
from tests.support.place_teller import PlaceTeller
from vime.errors import SettingsError
from vime.settings.placement import Demand

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[str]:
    """Address of a cluster whose nodes say that they have 2 and 4 GPUs."""
    cluster = RayCluster()
    try:
        for name, gpus in (("small", 2), ("large", 4)):
            cluster.add_node(num_cpus=1, num_gpus=gpus, node_name=name, object_store_memory=80 * 2**20)
        yield cluster.address
    finally:
        cluster.shutdown()


@pytest.fixture
def joined(two_nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", two_nodes)


async def told(cluster: Cluster, num_workers: int) -> list[tuple[str, list[str]]]:
    actors: list[Any] = [cluster.spawn_worker(PlaceTeller, number) for number in range(num_workers)]
    return list(await asyncio.gather(*(actor.tell.remote() for actor in actors)))


@pytest.mark.usefixtures("joined")
def test_ranks_and_engines_run_on_their_nodes_and_see_their_devices_alone() -> None:
    with Cluster(Demand((2,), (1, 3)), 0) as cluster:
        places = asyncio.run(told(cluster, 4))
    assert [name for name, _ in places] == ["small", "small", "large", "large"]
    assert [len(devices) for _, devices in places] == [1, 1, 1, 3]
    assert sorted(device for name, devices in places if name == "small" for device in devices) == ["0", "1"]
    assert sorted(device for name, devices in places if name == "large" for device in devices) == ["0", "1", "2", "3"]


@pytest.mark.slow
@pytest.mark.usefixtures("joined")
def test_colocated_engines_see_the_trainers_first_device_behind_their_own() -> None:
    with Cluster(Demand((2,), (1, 1), shared=True), 0) as cluster:
        (_, first), (_, second), (_, engine), (_, other) = asyncio.run(told(cluster, 4))
    assert engine == first
    assert other == [*second, *first]


@pytest.mark.slow
@pytest.mark.usefixtures("joined")
def test_an_engine_larger_than_a_node_has_a_part_on_each() -> None:
    with Cluster(Demand((), (4,), engines_per_node=2), 0) as cluster:
        parts = cluster.engine_places(0)
    assert [len(part.devices) for part in parts] == [2, 2]
    assert len({part.node_id for part in parts}) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("joined")
def test_what_a_run_holds_is_in_use_for_others_and_what_never_fits_is_refused_at_once() -> None:
    with Cluster(Demand((2,), (3,)), 0):
        offers = {node.name: str(node.offer("GPU")) for node in live_nodes()}
    assert offers == {"small": "0 free of 2 on small", "large": "1 free of 4 on large"}
    with pytest.raises(SettingsError, match=r"= 7 GPUs, there are .* Engine 3 of 3 with 1 GPU finds no room"):
        Cluster(Demand((4,), (1, 1, 1)), 0).__enter__()
