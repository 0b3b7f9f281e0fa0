"""What the nodes of a Ray cluster offer, and the devices that a run has reserved there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import GetTimeoutError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from vime.errors import SettingsError
from vime.settings.machine import Node
from vime.settings.placement import Placement

CPU_SLOT = "vime_slot"
"""Custom resource that stands for one GPU on machines without CUDA."""
GPU = "GPU"
_RESERVE_S = 60.0
_NODE_LABEL = "ray.io/node-id"
"""Ray's own label of every node."""


class ProcessPlace(msgspec.Struct, frozen=True):
    """Where a process runs: a node, the address at which others reach it, and the CUDA devices that it sees."""

    node_id: str
    address: str
    devices: tuple[str, ...] = ()


class RayNode(msgspec.Struct, frozen=True):
    """One live node."""

    id: str
    address: str
    name: str
    free: dict[str, float]
    total: dict[str, float]

    def offer(self, resource: str) -> Node:
        """How many devices of a kind it has."""
        free, total = (int(amounts.get(resource, 0)) for amounts in (self.free, self.total))
        return Node(self.name, free, in_use=total - free)


def live_nodes() -> list[RayNode]:
    """Those of the connected cluster."""
    free = available_resources_per_node()
    return [
        RayNode(node["NodeID"], node["NodeManagerAddress"], node["NodeName"], free[node["NodeID"]], node["Resources"])
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] in free
    ]


def device_kind(nodes: Sequence[RayNode]) -> str:
    """GPUs where any node has one, else slots."""
    return GPU if any(node.total.get(GPU, 0) > 0 for node in nodes) else CPU_SLOT


def reserve(placement: Placement, nodes: Sequence[RayNode], resource: str) -> list[ProcessPlace]:
    """Reserve each share on its node in one placement group; the places, each with all devices of its share.

    Raises:
        SettingsError: the devices were free a moment ago and are not any more, or a node does not answer.
    """
    taken = [nodes[share.number] for share in placement.shares]
    bundles = [{resource: share.num_devices} for share in placement.shares]
    pins = [{_NODE_LABEL: node.id} for node in taken]
    group = ray.util.placement_group(bundles, strategy="PACK", bundle_label_selector=pins)
    if not group.wait(_RESERVE_S):
        ray.util.remove_placement_group(group)
        raise SettingsError(
            f"Ray did not reserve {bundles} within {_RESERVE_S:g} s.",
            next_step="Another job may have taken the devices meanwhile (`ray status` tells); start again.",
        )
    if resource != GPU:
        return [ProcessPlace(node.id, _address(node, nodes)) for node in taken]
    asking = [
        ray.remote(num_cpus=0, num_gpus=share.num_devices)(_assigned_gpus)
        .options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
            runtime_env=runtime_env(None),
        )
        .remote()
        for number, share in enumerate(placement.shares)
    ]
    try:
        assigned: list[list[str]] = ray.get(asking, timeout=_RESERVE_S)
    except GetTimeoutError as error:
        ray.util.remove_placement_group(group)
        names = ", ".join(node.name for node in taken)
        raise SettingsError(
            f"Ray reserved {bundles}, but did not say within {_RESERVE_S:g} s which devices of {names} these are.",
            next_step="A node may have left, or starts no process (`ray status`, and its Ray logs, tell); start again.",
        ) from error
    return [
        ProcessPlace(node.id, _address(node, nodes), tuple(devices))
        for node, devices in zip(taken, assigned, strict=True)
    ]


def spawn_at(place: ProcessPlace, actor: type, *args: Any, env: dict[str, str] | None = None) -> Any:
    """Start an actor there, on devices that are reserved already."""
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(place.devices)} if place.devices else {}
    strategy = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
    remote = ray.remote(num_cpus=0)(actor)
    return remote.options(scheduling_strategy=strategy, runtime_env=runtime_env({**(env or {}), **visible})).remote(
        *args
    )


def runtime_env(env: dict[str, str] | None) -> dict[str, Any]:
    """Of every process of a run: it imports what the driver imports, and Ray leaves its devices alone."""
    always = {"PYTHONPATH": os.pathsep.join(_import_path()), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    return {"env_vars": {**always, **(env or {})}}


def _import_path() -> list[str]:
    """The folder that vime was started in comes first, so that the user's own modules can be imported there too."""
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return [str(Path.cwd()), *given]


def _assigned_gpus() -> list[str]:
    return [str(number) for number in ray.get_gpu_ids()]


def _address(node: RayNode, nodes: Sequence[RayNode]) -> str:
    """Where there is one node, nothing listens to others."""
    return node.address if len(nodes) > 1 else "127.0.0.1"
