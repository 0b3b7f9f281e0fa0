"""Which processes of a run have lost their node, and what they need elsewhere. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pipeline.node_devices import ProcessPlace
from vime.counted import counted
from vime.errors import RunFailedError
from vime.settings.machine import Node
from vime.settings.placement import Demand, NoRoom, Placement, place


@dataclass(frozen=True)
class Lost:
    """Processes whose node is gone; empty where all are left."""

    ranks: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]
    """Engine, and number of the part that lay there."""
    nodes: tuple[str, ...]
    """Their ids."""
    demand: Demand
    """What they need, each part of an engine on one node again."""

    def __bool__(self) -> bool:
        return bool(self.ranks or self.parts)

    @property
    def words(self) -> str:
        """ "trainer ranks 2, 3 and engine 1"."""
        kinds = [("trainer rank", self.ranks), ("engine", tuple(dict.fromkeys(engine for engine, _ in self.parts)))]
        return " and ".join(
            f"{kind}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
            for kind, numbers in kinds
            if numbers
        )


def lost_processes(
    demand: Demand,
    trainers: Sequence[ProcessPlace],
    engines: Sequence[Sequence[ProcessPlace]],
    live_nodes: Collection[str],
    *,
    of_trainers: bool = True,
    of_engines: Collection[int] | None = None,
) -> Lost:
    """The processes of a run of this `demand` that lie on none of the live nodes (ids).

    Only the trainer's, with `of_trainers`, and those of these engines (None: of all).
    """
    ranks = [rank for rank, place in enumerate(trainers) if of_trainers and place.node_id not in live_nodes]
    parts = [
        (engine, part)
        for engine, places in enumerate(engines)
        for part, place in enumerate(places)
        if place.node_id not in live_nodes and (of_engines is None or engine in of_engines)
    ]
    nodes = [trainers[rank].node_id for rank in ranks] + [engines[engine][part].node_id for engine, part in parts]
    needed = Demand(
        _training_nodes(demand, Counter(trainers[rank].node_id for rank in ranks)),
        tuple(part_size(demand, engines, engine) for engine, _ in parts),
        demand.shared,
        demand.engines_per_node,
    )
    return Lost(tuple(ranks), tuple(parts), tuple(dict.fromkeys(nodes)), needed)


def part_size(demand: Demand, engines: Sequence[Sequence[ProcessPlace]], engine: int) -> int:
    """Devices of each of an engine's parts."""
    return demand.engines[engine] // len(engines[engine])


def place_lost(nodes: Sequence[Node], lost: Lost, engines_there: Sequence[int]) -> Placement | NoRoom:
    """Where what is lost finds room on these nodes, on which engines have `engines_there` devices already."""
    placement = place(nodes, lost.demand, engines_there)
    if isinstance(placement, NoRoom):
        return placement
    for number, (engine, _) in enumerate(lost.parts):
        if len(placement.parts(number)) > 1:
            return NoRoom(f"A part of engine {engine} with {lost.demand.engines[number]} GPUs")
    return placement


def no_room_left(
    lost: Lost, names: Mapping[str, str], nodes: Sequence[Node], missing: NoRoom, waited_s: float
) -> RunFailedError:
    """The end of processes that nobody can take in: what was lost, what it needs, and what there is."""
    gone = [names[node] for node in lost.nodes]
    free = ", ".join(map(str, nodes)) or "no node"
    return RunFailedError(
        f"{counted(len(gone), 'node')} ({', '.join(gone)}) left the Ray cluster with {lost.words}. Needed elsewhere: "
        f"{lost.demand}; after {waited_s:g} s there are {free}. {missing.words}",
        next_step="Add a node, or ask for less with --actor-num-nodes, --actor-num-gpus-per-node or "
        "--rollout-num-gpus; the same command resumes from the newest commit.",
    )


def _training_nodes(demand: Demand, lost: Counter[str]) -> tuple[int, ...]:
    """Sizes of the pieces that the lost ranks of each node (id -> how many) lie on one node as."""
    sizes = set(demand.trainer_nodes)
    if len(sizes) != 1:
        return tuple(lost.values())
    (size,) = sizes
    return tuple(size for count in lost.values() for _ in range(count // size))
