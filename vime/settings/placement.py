"""Which devices of which nodes each trainer rank and each engine gets. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from vime.counted import counted
from vime.errors import SettingsError
from vime.settings.machine import Node

PlacedNode = int
"""Number of a node among those that were offered."""


@dataclass(frozen=True)
class Demand:
    """What a run asks for. Without CUDA a GPU is one worker process.

    `trainer_nodes` are the GPUs of each training node, `engines` those of each engine. With `shared` engines use the
    trainer's GPUs again, and more where these are not enough; else one node gives at most `engines_per_node` GPUs to
    engines.
    """

    trainer_nodes: tuple[int, ...] = ()
    engines: tuple[int, ...] = ()
    shared: bool = False
    engines_per_node: int | None = None

    @property
    def num_gpus(self) -> int:
        ranks, workers = sum(self.trainer_nodes), sum(self.engines)
        return max(ranks, workers) if self.shared else ranks + workers

    def __str__(self) -> str:
        kinds = []
        for what, each, sizes in (
            ("training", "on each of {} nodes", self.trainer_nodes),
            ("generation", "for each of {} engines", self.engines),
        ):
            same = len(set(sizes)) == 1 and len(sizes) > 1
            detail = f", {sizes[0]} {each.format(len(sizes))}" if same else ""
            kinds.append(f"{sum(sizes)} ({what}{detail})")
        return f"{kinds[0]} and {kinds[1]} = {counted(self.num_gpus, 'GPU')}"


@dataclass(frozen=True)
class Seat:
    """One device: number of the share in the placement, and which of the share's devices, both from 0."""

    share: int
    device: int


@dataclass(frozen=True)
class Share:
    """What the run takes of one node; `number` is the node's among those that were offered."""

    number: int
    node: Node
    num_devices: int


@dataclass(frozen=True)
class Placement:
    """Who sits where. An engine's seats are in the order of its workers: those of its first node come first."""

    shares: tuple[Share, ...]
    trainers: tuple[Seat, ...]
    engines: tuple[tuple[Seat, ...], ...]

    def parts(self, engine: int) -> list[list[Seat]]:
        """The engine's seats, node by node."""
        by_share: dict[int, list[Seat]] = {}
        for seat in self.engines[engine]:
            by_share.setdefault(seat.share, []).append(seat)
        return list(by_share.values())


@dataclass(frozen=True)
class NoRoom:
    """The first piece that finds no room, and a limit that it met, if it is not the nodes' own."""

    piece: str
    limit: str = ""

    @property
    def words(self) -> str:
        limited = f"; {self.limit}" if self.limit else ""
        return f"{self.piece} finds no room{limited} (without CUDA a GPU is one worker process)."

    @property
    def next_step(self) -> str:
        others = " or raise --num-gpus-per-node" if self.limit else ""
        return f"Lower --actor-num-gpus-per-node or --rollout-num-gpus{others}, or add nodes."


def no_room(demand: Demand, nodes: Sequence[Node], missing: NoRoom) -> SettingsError:
    """The refusal of a run: what it needs, what each node has free, and what finds no room."""
    free = ", ".join(map(str, nodes)) or "no node"
    return SettingsError(f"The run needs {demand}, there are {free}. {missing.words}", next_step=missing.next_step)


def place(nodes: Sequence[Node], demand: Demand, engines_there: Sequence[int] = ()) -> Placement | NoRoom:
    """A placement of everything, or the first piece that finds no room.

    `engines_there` are the devices of each node that engines of the same run have already, which `engines_per_node`
    counts too; none where it is empty.

    A training node's ranks lie on one node. An engine lies on one node, or, larger than any node, in equal parts on as
    few as have room for it. Pieces go where the least room is left that is enough, so large ones keep theirs; where
    this fails with the trainer first, engines are placed first.
    """
    there = engines_there or [0] * len(nodes)
    first = _fill(nodes, demand, there, engines_first=False)
    if demand.shared or not isinstance(first, NoRoom):
        return first
    second = _fill(nodes, demand, there, engines_first=True)
    return first if isinstance(second, NoRoom) else second


def _fill(nodes: Sequence[Node], demand: Demand, there: Sequence[int], *, engines_first: bool) -> Placement | NoRoom:
    desk = _SharedDesk(nodes, demand, there) if demand.shared else _Desk(nodes, demand, there)
    steps = (desk.seat_engines, desk.seat_trainers) if engines_first else (desk.seat_trainers, desk.seat_engines)
    for step in steps:
        missing = step()
        if missing is not None:
            return missing
    return desk.placement()


class _Desk:
    """Nodes that are being given away."""

    def __init__(self, nodes: Sequence[Node], demand: Demand, engines_there: Sequence[int]) -> None:
        self._nodes, self._demand, self._there = nodes, demand, engines_there
        self._ranks: Counter[PlacedNode] = Counter()
        self._workers: Counter[PlacedNode] = Counter()
        self._trainers: list[PlacedNode] = []
        self._engines: list[list[tuple[PlacedNode, int]]] = []
        """Of each engine its nodes, and its workers on each."""

    def seat_trainers(self) -> NoRoom | None:
        sizes = self._demand.trainer_nodes
        for number, size in enumerate(sizes):
            node = _tightest({n: self._free(n) for n in range(len(self._nodes))}, size)
            if node is None:
                return NoRoom(f"Training node {number + 1} of {len(sizes)} with {counted(size, 'GPU')}")
            self._ranks[node] += size
            self._trainers += [node] * size
        self._trainers.sort()
        return None

    def seat_engines(self) -> NoRoom | None:
        sizes = self._demand.engines
        for number, size in enumerate(sizes):
            parts = self._engine_parts(size)
            if parts is None:
                return NoRoom(f"Engine {number + 1} of {len(sizes)} with {counted(size, 'GPU')}", self._limit(size))
            for node, count in parts:
                self._workers[node] += count
            self._engines.append(parts)
        return None

    def placement(self) -> Placement:
        used = [node for node in range(len(self._nodes)) if self._ranks[node] or self._workers[node]]
        shares = tuple(Share(node, self._nodes[node], self._total(node)) for node in used)
        share_of = {node: number for number, node in enumerate(used)}
        next_rank: Counter[PlacedNode] = Counter()
        next_worker = Counter({node: self._first_worker(node) for node in used})

        def seats(node: PlacedNode, count: int, counter: Counter[PlacedNode]) -> list[Seat]:
            counter[node] += count
            return [Seat(share_of[node], device) for device in range(counter[node] - count, counter[node])]

        trainers = [seat for node in self._trainers for seat in seats(node, 1, next_rank)]
        engines = [
            tuple(seat for node, count in parts for seat in seats(node, count, next_worker)) for parts in self._engines
        ]
        return Placement(shares, tuple(trainers), tuple(engines))

    def _free(self, node: PlacedNode) -> int:
        return self._nodes[node].gpus - self._ranks[node] - self._workers[node]

    def _room(self, node: PlacedNode) -> int:
        """Devices that engines may still have."""
        limit = self._demand.engines_per_node
        if limit is None:
            return self._free(node)
        return min(self._free(node), limit - self._there[node] - self._workers[node])

    def _total(self, node: PlacedNode) -> int:
        return self._ranks[node] + self._workers[node]

    def _first_worker(self, node: PlacedNode) -> int:
        return self._ranks[node]

    def _limit(self, size: int) -> str:
        """What keeps an engine from free devices."""
        limit = self._demand.engines_per_node
        if limit is None or all(self._free(node) < size for node in range(len(self._nodes))):
            return ""
        return f"--num-gpus-per-node leaves engines {limit} GPUs of a node"

    def _engine_parts(self, size: int) -> list[tuple[PlacedNode, int]] | None:
        room = {node: self._room(node) for node in range(len(self._nodes))}
        node = self._one_node(room, size)
        if node is not None:
            return [(node, size)]
        return None if size <= self._largest_node() else _equal_parts(room, size)

    def _largest_node(self) -> int:
        """Engines up to this size lie on one node, though another's room may be split."""
        sizes = [node.gpus + node.in_use for node in self._nodes]
        limit = self._demand.engines_per_node
        return max(sizes, default=0) if limit is None else min(limit, max(sizes, default=0))

    def _one_node(self, room: dict[PlacedNode, int], size: int) -> PlacedNode | None:
        return _tightest(room, size)


class _SharedDesk(_Desk):
    """Engines sit where trainers sit, too."""

    def _room(self, node: PlacedNode) -> int:
        return self._nodes[node].gpus - self._workers[node]

    def _total(self, node: PlacedNode) -> int:
        return max(self._ranks[node], self._workers[node])

    def _first_worker(self, node: PlacedNode) -> int:  # noqa: ARG002 - the same on every node
        return 0

    def _limit(self, size: int) -> str:  # noqa: ARG002 - nothing but the nodes limits them
        return ""

    def _one_node(self, room: dict[PlacedNode, int], size: int) -> PlacedNode | None:
        beside_ranks = {node: self._ranks[node] - self._workers[node] for node in room}
        for offered in (beside_ranks, {node: room[node] for node in room if self._ranks[node]}, room):
            node = next((node for node, free in offered.items() if free >= size), None)
            if node is not None:
                return node
        return None


def _tightest(room: dict[PlacedNode, int], size: int) -> PlacedNode | None:
    """The node with the least room that is enough."""
    return min((node for node in room if room[node] >= size), key=lambda node: room[node], default=None)


def _equal_parts(room: dict[PlacedNode, int], size: int) -> list[tuple[PlacedNode, int]] | None:
    """The fewest nodes with room for equal parts, those with the least room that is enough."""
    for count in range(2, min(len(room), size) + 1):
        part, rest = divmod(size, count)
        enough = sorted((node for node in room if room[node] >= part), key=lambda node: room[node])
        if not rest and len(enough) >= count:
            return [(node, part) for node in sorted(enough[:count])]
    return None
