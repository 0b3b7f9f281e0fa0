"""Before a run touches its queue: the file system under it is tried, here and on every node of the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.doctor.check import Check, failed, passed
from pipeline.doctor.storage import refuse_failed, storage_checks, two_clients_check
from pipeline.node_clients import Node, NodeClient, find_node, other_nodes
from pipeline.storage_declaration import read_declaration
from vime.errors import StorageError
from vime.folders import existing_parent
from vime.settings.groups.queue import QueueSettings


def prove_here(folder: Path, settings: QueueSettings) -> None:
    """Refuse a folder whose file system can't hold the durable queue; with a declaration it must be JuiceFS, and as
    declared.

    Raises:
        SettingsError: the declaration can't be read.
        StorageError: with every reason.
    """
    if settings.rollout_data_transport == "straw":
        refuse_failed(storage_checks(folder, read_declaration(settings.rollout_storage_declaration)), folder)


async def prove_nodes(folder: Path, settings: QueueSettings) -> None:
    """Refuse a folder that another node of the connected cluster does not have at the same path, or sees otherwise.

    Raises:
        StorageError: with every reason, node by node.
    """
    if settings.rollout_data_transport != "straw":
        return
    place, declaration = existing_parent(folder), read_declaration(settings.rollout_storage_declaration)
    lists = await asyncio.gather(*(asyncio.to_thread(node_checks, node, place, declaration) for node in other_nodes()))
    refuse_failed([check for checks in lists for check in checks], folder)


def node_checks(node: Node, folder: Path, declaration: Mapping[str, Any] | None) -> list[Check]:
    """`folder` as this node has it, against the view from here."""
    name = f"storage on {node}"
    try:
        with NodeClient(node) as client:
            wrong = client.faults(folder, declaration)
            if wrong:
                return [failed(name, f"{folder}: {'; '.join(wrong)}.", "Mount it at the same path on every node.")]
            return [passed(name, f"{folder} is there"), two_clients_check(folder, str(node), client.enter)]
    except StorageError as error:
        return [failed(name, error.message, error.next_step)]


def host_checks(host: str, folder: Path, declaration: Mapping[str, Any] | None) -> list[Check]:
    """`node_checks` of a node called `host` in the Ray cluster that runs on this machine."""
    import ray

    name = "other client"
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        return [
            failed(
                name,
                f"{host} is no mount on this machine, and there is no Ray cluster through which to ask it ({error}).",
                "Give the path of a second mount, or start Ray on both hosts (`ray start`).",
            )
        ]
    try:
        return node_checks(find_node(host), existing_parent(folder), declaration)
    except StorageError as error:
        return [failed(name, error.message, error.next_step)]
    finally:
        ray.shutdown()
