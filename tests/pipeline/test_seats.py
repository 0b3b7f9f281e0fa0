"""Who has lost a node waits for room on another one without holding up anybody else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from pipeline import node_devices, seats
from pipeline.node_devices import CPU_SLOT, GPU, ProcessPlace, RayNode, reserve
from pipeline.seats import Seats
from vime.errors import SettingsError
from vime.settings.machine import Node
from vime.settings.placement import Demand, Placement, Share


def node(name: str, devices: int, resource: str = CPU_SLOT) -> RayNode:
    return RayNode(name, "127.0.0.1", name, {resource: float(devices)}, {resource: float(devices)})


class Nodes:
    """Those that live, and what was reserved on them."""

    def __init__(self, *live: RayNode) -> None:
        self.live = list(live)

    def reserve(self, placement: Placement, nodes: Sequence[RayNode], _resource: str) -> list[ProcessPlace]:
        return [ProcessPlace(nodes[share.number].id, "127.0.0.1") for share in placement.shares]


async def test_those_who_wait_for_room_take_no_thread_from_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    nodes = Nodes(node("a", 3))
    monkeypatch.setattr(seats, "live_nodes", lambda: list(nodes.live))
    monkeypatch.setattr(seats, "reserve", nodes.reserve)
    places = Seats(Demand((1,), (1, 1)), room_s=60.0)
    places.take(nodes.live)
    nodes.live = [node("b", 0)]
    waiting = [asyncio.create_task(places.leave_lost_nodes(each)) for each in (None, 0, 1)]
    async with asyncio.timeout(10):
        for _ in range(3):
            assert await asyncio.to_thread(str, "a commit goes on") == "a commit goes on"
        nodes.live = [node("c", 3)]
        told = await asyncio.gather(*waiting)
    assert told == [f"Lost from the Ray cluster: a. Started on c instead: {what}." for what in (
        "trainer rank 0", "engine 0", "engine 1")]  # fmt: skip
    assert [place.node_id for place in (*places.trainers, *places.of_engine(0), *places.of_engine(1))] == ["c"] * 3


def test_a_node_that_does_not_name_its_devices_is_told_and_its_reservation_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    removed: list[Any] = []
    group = SimpleNamespace(wait=lambda _seconds: True)

    def late(*_: Any, **__: Any) -> Any:
        raise GetTimeoutError("Get timed out")

    task = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=object))
    fake = SimpleNamespace(
        util=SimpleNamespace(placement_group=lambda *_, **__: group, remove_placement_group=removed.append),
        remote=lambda **_: lambda _function: task,
        get=late,
    )
    monkeypatch.setattr(node_devices, "ray", fake)
    monkeypatch.setattr(node_devices, "PlacementGroupSchedulingStrategy", lambda *_, **__: None)
    placement = Placement((Share(0, Node("large", 2), 2),), (), ())
    with pytest.raises(SettingsError, match="did not say within 60 s which devices of large these are") as caught:
        reserve(placement, [node("large", 2, GPU)], GPU)
    assert "ray status" in str(caught.value.next_step)
    assert removed == [group]
