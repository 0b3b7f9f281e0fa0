"""Whether trainer nodes and engines find room on the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Sequence

from vime.settings.machine import Node


def unplaced(
    nodes: Sequence[Node], trainer_nodes: Sequence[int], engines: Sequence[int], *, shared: bool
) -> str | None:
    """The first piece that finds no room, in words; None when everything fits.

    `trainer_nodes` are the GPUs that each training node needs on one node, `engines` those of each engine, which lies
    on one node or fills whole ones. With `shared` the engines use the trainer's GPUs again.
    """
    free = [node.gpus for node in nodes]
    for number, need in enumerate(trainer_nodes):
        if not _take_from_one(free, need):
            return f"Training node {number + 1} of {len(trainer_nodes)} with {need} GPUs"
    if shared:
        free = [node.gpus for node in nodes]
    for number, need in enumerate(engines):
        if not _take_from_one(free, need) and not _take_whole_nodes(free, need, nodes):
            return f"Engine {number + 1} of {len(engines)} with {need} GPUs"
    return None


def _take_from_one(free: list[int], need: int) -> bool:
    """Best fit: the node with the least room that is enough."""
    fitting = [index for index, gpus in enumerate(free) if gpus >= need]
    if not fitting:
        return False
    free[min(fitting, key=lambda index: free[index])] -= need
    return True


def _take_whole_nodes(free: list[int], need: int, nodes: Sequence[Node]) -> bool:
    whole = [index for index, node in enumerate(nodes) if free[index] == node.gpus > 0]
    taken, left = [], need
    for index in sorted(whole, key=lambda index: -free[index]):
        if free[index] <= left:
            taken.append(index)
            left -= free[index]
    if left:
        return False
    for index in taken:
        free[index] = 0
    return True
