"""Where each trainer rank and each engine of a run sits, and where those go that lose their node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence

import msgspec

from pipeline.lost_nodes import Lost, lost_processes, no_room_left, part_size, place_lost
from pipeline.node_devices import CPU_SLOT, ProcessPlace, RayNode, device_kind, live_nodes, reserve
from vime.errors import RunFailedError, SettingsError
from vime.settings.machine import Node
from vime.settings.placement import Demand, NoRoom, Placement, Seat, no_room, place

ROOM_S = 60.0
"""How long processes that have lost their node wait for room on another one."""
_POLL_S = 0.2


class Seats:
    """The places that a run has reserved in the connected cluster."""

    def __init__(self, demand: Demand, room_s: float = ROOM_S) -> None:
        self._demand, self._room_s, self._moving = demand, room_s, asyncio.Lock()
        self.trainers: list[ProcessPlace] = []
        """Of each rank."""
        self._engines: list[list[ProcessPlace]] = []
        self._node_names: dict[str, str] = {}
        """Of all nodes that were seen, by their ids."""
        self._resource = CPU_SLOT

    def take(self, nodes: Sequence[RayNode]) -> None:
        """Reserve places for all. Raises `SettingsError` where they don't fit."""
        self._node_names |= {node.id: node.name for node in nodes}
        self._resource = device_kind(nodes)
        placement = placed([node.offer(self._resource) for node in nodes], self._demand)
        shares = reserve(placement, nodes, self._resource)
        self.trainers = [_devices_of(shares, [seat]) for seat in placement.trainers]
        self._engines = [
            [_devices_of(shares, part) for part in placement.parts(number)] for number in range(len(placement.engines))
        ]

    def of_engine(self, number: int) -> list[ProcessPlace]:
        """Of each of an engine's parts, one for each node that it lies on."""
        lender = self.trainers[0] if self._demand.shared and self.trainers else None
        return [_seeing(part, lender) for part in self._engines[number]]

    async def leave_lost_nodes(self, engine: int | None = None) -> str:
        """Give the trainer's ranks, or those of an engine's parts, that have lost their node a place on another one.

        Where trainer and engines share devices, all that is lost moves together. Waits for room, one call after the
        other. What moved where, in words; empty where nothing is lost.

        Raises:
            RunFailedError: no other node has room.
        """
        async with self._moving:
            lost = await asyncio.to_thread(self._lost, engine)
            if not lost:
                return ""
            deadline = time.monotonic() + self._room_s
            while (missing := await asyncio.to_thread(self._moved, lost)) is not None:
                if time.monotonic() > deadline:
                    offers = [node.offer(self._resource) for node in await asyncio.to_thread(live_nodes)]
                    raise no_room_left(lost, self._node_names, offers, missing, self._room_s)
                await asyncio.sleep(_POLL_S)
            return self._moved_words(lost)

    def _lost(self, engine: int | None) -> Lost:
        together = self._demand.shared
        of_engines = None if together else ([] if engine is None else [engine])
        return lost_processes(
            self._demand,
            self.trainers,
            self._engines,
            {node.id for node in live_nodes()},
            of_trainers=together or engine is None,
            of_engines=of_engines,
        )

    def _moved(self, lost: Lost) -> NoRoom | None:
        """Reserve other places for what is lost, and seat it there; what finds no room."""
        nodes = live_nodes()
        self._node_names |= {node.id: node.name for node in nodes}
        there = [self._engine_devices_on(node.id) for node in nodes]
        placement = place_lost([node.offer(self._resource) for node in nodes], lost, there)
        if isinstance(placement, NoRoom):
            return placement
        try:
            shares = reserve(placement, nodes, self._resource)
        except SettingsError as error:
            raise RunFailedError(error.message, next_step=error.next_step) from error
        for rank, seat in zip(lost.ranks, placement.trainers, strict=True):
            self.trainers[rank] = _devices_of(shares, [seat])
        for number, (engine, part) in enumerate(lost.parts):
            self._engines[engine][part] = _devices_of(shares, placement.engines[number])
        return None

    def _engine_devices_on(self, node_id: str) -> int:
        return sum(
            part_size(self._demand, self._engines, engine)
            for engine, parts in enumerate(self._engines)
            for part in parts
            if part.node_id == node_id
        )

    def _moved_words(self, lost: Lost) -> str:
        new = [self.trainers[rank] for rank in lost.ranks]
        new += [self._engines[engine][part] for engine, part in lost.parts]
        gone, where = self._names(lost.nodes), self._names(place.node_id for place in new)
        return f"Lost from the Ray cluster: {gone}. Started on {where} instead: {lost.words}."

    def _names(self, nodes: Iterable[str]) -> str:
        return ", ".join(dict.fromkeys(self._node_names[node] for node in nodes))


def placed(nodes: Sequence[Node], demand: Demand) -> Placement:
    """Where everything goes. Raises `SettingsError` that names what finds no room."""
    placement = place(nodes, demand)
    if isinstance(placement, NoRoom):
        raise no_room(demand, nodes, placement)
    return placement


def _devices_of(shares: Sequence[ProcessPlace], seats: Sequence[Seat]) -> ProcessPlace:
    """The place of a process on these seats, which are on one node."""
    share = shares[seats[0].share]
    return msgspec.structs.replace(share, devices=tuple(share.devices[seat.device] for seat in seats if share.devices))


def _seeing(engine: ProcessPlace, lender: ProcessPlace | None) -> ProcessPlace:
    """Behind its own devices an engine sees the one in whose memory the trainer's first rank hands weights over."""
    if lender is None or lender.node_id != engine.node_id:
        return engine
    return msgspec.structs.replace(engine, devices=tuple(dict.fromkeys((*engine.devices, *lender.devices))))
