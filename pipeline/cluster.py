"""Ray, as a run uses it: placement checked before it is asked for, a place for each process, nothing left behind."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.devices import cpu_slots, visible_gpus
from pipeline.guard import guarded
from pipeline.lost_nodes import Lost, lost_processes, no_room_left, part_size, place_lost
from pipeline.node_devices import CPU_SLOT, ProcessPlace, device_kind, live_nodes, reserve, runtime_env, spawn_at
from vime.errors import ClusterStartError, ProcessDiedError, RunFailedError, SettingsError, StalledError, VimeError
from vime.settings.machine import Node
from vime.settings.placement import Demand, NoRoom, Placement, Seat, no_room, place

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

OBJECT_STORE_BYTES = 128 * 2**20
"""Where only control messages travel through Ray; where samples do, Ray takes its own share of the memory."""

MAX_CALLS = 100_000
"""Calls at once of an actor that only waits for others."""
CONTROL_S = 120.0
"""How long a process may take to answer a call that has nothing to wait for."""

RELEASE_S = 10.0
"""How long Ray may take to free what a run has left that ended just before."""
ROOM_S = 60.0
"""How long processes that have lost their node wait for room on another one."""
_POLL_S = 0.2


@contextmanager
def _failing_as_one_error(joined: str | None) -> Iterator[None]:
    """Whatever keeps Ray from starting, or the run from joining the cluster at an address, as `ClusterStartError`."""
    try:
        yield
    except Exception as error:  # Ray raises Exception itself when a part of it isn't there in time
        what = f"RAY_ADDRESS is {joined}, which can't be joined" if joined else "Ray did not start on this machine"
        raise ClusterStartError(
            f"{what}: {next(iter(str(error).splitlines()), type(error).__name__)}",
            next_step="Start a cluster there (`ray start --head`), or unset RAY_ADDRESS and the run starts its own."
            if joined
            else "It may lack memory or be too busy: `vime doctor` looks. The same command tries again.",
        ) from error


class Cluster:
    """A Ray instance in which each process of a run has its place. Use with `with`.

    `RAY_ADDRESS` in the environment names a cluster to join, of one node or several; else the run has one of its own.
    """

    def __init__(
        self, demand: Demand, num_producers: int, *, carries_samples: bool = False, room_s: float = ROOM_S
    ) -> None:
        """Raises `SettingsError` when this machine lacks the devices and no cluster is joined."""
        self._room_s, self._moving = room_s, threading.Lock()
        self._demand, self._num_producers = demand, num_producers
        self._object_store_bytes = None if carries_samples else OBJECT_STORE_BYTES
        self._joined = os.environ.get("RAY_ADDRESS")
        self._gpus = visible_gpus()
        if not self._joined:
            self._placed([Node(platform.node() or "this machine", self._gpus or cpu_slots())])
        self._exits = ExitStack()
        self.host = "127.0.0.1"
        """Address of this node, as the run's other processes reach it."""
        self._trainers: list[ProcessPlace] = []
        self._engines: list[list[ProcessPlace]] = []
        self._node_names: dict[str, str] = {}
        """Of all nodes that were seen, by their ids."""
        self._resource = CPU_SLOT

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _start(self) -> None:
        self.temporary = Path(tempfile.mkdtemp(prefix="vime-ray-"))
        self._exits.callback(shutil.rmtree, self.temporary, ignore_errors=True)
        with _failing_as_one_error(self._joined):
            if self._joined:
                ray.init(address=self._joined, log_to_driver=False, logging_level=logging.ERROR)
            else:
                self._start_own()
        deadline = time.monotonic() + RELEASE_S
        while self._waits_for_others() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        nodes = live_nodes()
        if len(nodes) > 1:
            self.host = ray.util.get_node_ip_address()
        self._node_names |= {node.id: node.name for node in nodes}
        self._resource = device_kind(nodes)
        placement = self._placed([node.offer(self._resource) for node in nodes])
        self._seat(placement, reserve(placement, nodes, self._resource))

    def _waits_for_others(self) -> bool:
        """Whether the run would fit if the devices were free that are in use, as those of a run that has just ended."""
        nodes = live_nodes()
        offered = [node.offer(device_kind(nodes)) for node in nodes]
        empty = [Node(node.name, node.gpus + node.in_use) for node in offered]
        return isinstance(place(offered, self._demand), NoRoom) and not isinstance(place(empty, self._demand), NoRoom)

    def _start_own(self) -> None:
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        self._exits.enter_context(guarded(self.temporary))
        ray.init(
            address="local",
            num_cpus=self._demand.num_gpus + self._num_producers + 2,
            num_gpus=self._gpus,
            resources=None if self._gpus else {CPU_SLOT: cpu_slots()},
            object_store_memory=self._object_store_bytes,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(self.temporary),
        )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        ray.shutdown()
        self._exits.close()

    def spawn_worker(self, actor: type, bundle: int, *args: Any, env: dict[str, str] | None = None) -> Any:
        """Start a trainer rank's actor, or behind all ranks an engine's, where it has its devices."""
        num_ranks = len(self._trainers)
        where = self._trainers[bundle] if bundle < num_ranks else self.engine_places(bundle - num_ranks)[0]
        return spawn_at(where, actor, *args, env=env)

    def engine_places(self, number: int) -> list[ProcessPlace]:
        """Where the engine's parts run, one for each node that it lies on; its actor runs at the first."""
        lender = self._trainers[0] if self._demand.shared and self._trainers else None
        return [_seeing(part, lender) for part in self._engines[number]]

    def end(self, actor: Any) -> None:
        """End an actor's process; its place is free for another one then."""
        ray.kill(actor)

    def spawn(self, actor: type, *args: Any, restarts: int = 0) -> Any:
        """Start an actor that needs no device on the driver's node; `restarts` < 0 lets Ray restart it for ever."""
        strategy = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"max_restarts": restarts, "max_task_retries": restarts, "scheduling_strategy": strategy}
        return ray.remote(num_cpus=0)(actor).options(runtime_env=runtime_env(None), **options).remote(*args)

    def spawn_everywhere(self, actor: type) -> list[Any]:
        """Start an actor on each live node, which needs no device and which Ray restarts for ever."""
        remote = ray.remote(num_cpus=0)(actor)
        return [
            remote.options(
                max_restarts=-1,
                max_concurrency=MAX_CALLS,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
                runtime_env=runtime_env(None),
            ).remote()
            for node in live_nodes()
        ]

    def leave_lost_nodes(self, engine: int | None = None) -> str:
        """Give the trainer's ranks, or those of an engine's parts, that have lost their node a place on another one.

        Where trainer and engines share devices, all that is lost moves together. Waits for room, so call it in a
        thread. What moved where, in words; empty where nothing is lost.

        Raises:
            RunFailedError: no other node has room.
        """
        with self._moving:
            lost = self._lost(engine)
            if not lost:
                return ""
            deadline = time.monotonic() + self._room_s
            while (missing := self._moved(lost)) is not None:
                if time.monotonic() > deadline:
                    offers = [node.offer(self._resource) for node in live_nodes()]
                    raise no_room_left(lost, self._node_names, offers, missing, self._room_s)
                time.sleep(_POLL_S)
            return self._moved_words(lost)

    def _lost(self, engine: int | None) -> Lost:
        together = self._demand.shared
        of_engines = None if together else ([] if engine is None else [engine])
        return lost_processes(
            self._demand,
            self._trainers,
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
            self._trainers[rank] = _devices_of(shares, [seat])
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
        new = [self._trainers[rank] for rank in lost.ranks]
        new += [self._engines[engine][part] for engine, part in lost.parts]
        gone, where = self._names(lost.nodes), self._names(place.node_id for place in new)
        return f"Lost from the Ray cluster: {gone}. Started on {where} instead: {lost.words}."

    def _names(self, nodes: Iterable[str]) -> str:
        return ", ".join(dict.fromkeys(self._node_names[node] for node in nodes))

    def _placed(self, nodes: Sequence[Node]) -> Placement:
        placement = place(nodes, self._demand)
        if isinstance(placement, NoRoom):
            raise no_room(self._demand, nodes, placement)
        return placement

    def _seat(self, placement: Placement, shares: Sequence[ProcessPlace]) -> None:
        self._trainers = [_devices_of(shares, [seat]) for seat in placement.trainers]
        self._engines = [
            [_devices_of(shares, part) for part in placement.parts(number)] for number in range(len(placement.engines))
        ]


def _devices_of(shares: Sequence[ProcessPlace], seats: Sequence[Seat]) -> ProcessPlace:
    """The place of a process on these seats, which are on one node."""
    share = shares[seats[0].share]
    return msgspec.structs.replace(share, devices=tuple(share.devices[seat.device] for seat in seats if share.devices))


def _seeing(engine: ProcessPlace, lender: ProcessPlace | None) -> ProcessPlace:
    """Behind its own devices an engine sees the one in whose memory the trainer's first rank hands weights over."""
    if lender is None or lender.node_id != engine.node_id:
        return engine
    return msgspec.structs.replace(engine, devices=tuple(dict.fromkeys((*engine.devices, *lender.devices))))


async def answer(
    reference: Awaitable[_Result], process: str, *, within_s: float | None = None, doing: str = "answer"
) -> _Result:
    """Await an actor's answer; its own exceptions come out as they were raised. `doing` says what it is asked for.

    Raises:
        ProcessDiedError: the process died.
        StalledError: no answer came `within_s` seconds.
    """
    try:
        async with asyncio.timeout(within_s):
            return await reference
    except RayTaskError as error:
        raise error.cause from error
    except (RayActorError, ActorUnschedulableError) as error:
        reason = str(error).strip().splitlines()[-1].partition(" Some common causes")[0]
        raise ProcessDiedError(
            f"{process} died. {reason}", next_step="Run the same command again; it resumes from the newest commit."
        ) from error
    except TimeoutError as error:
        raise StalledError(
            f"{process} did not {doing} within {within_s:g} s.", next_step="Look at its log in the run folder."
        ) from error


async def closed(reference: Awaitable[Any], process: str) -> None:
    """Wait for an actor's close; one that is gone already has closed, one that fails to is told."""
    try:
        await answer(reference, process)
    except ProcessDiedError:
        return
    except VimeError as error:
        logger.warning("%s did not close in order: %s", process, error)
