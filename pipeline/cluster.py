"""Ray, as a run uses it: placement checked before it is asked for, a place for each process, nothing left behind."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import shutil
import time
from collections.abc import Awaitable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.devices import cpu_slots, visible_gpus
from pipeline.guard import guarded
from pipeline.node_devices import CPU_SLOT, ProcessPlace, device_kind, live_nodes, runtime_env, spawn_at
from pipeline.seats import ROOM_S, Seats, placed
from vime.errors import ClusterStartError, ProcessDiedError, StalledError, VimeError
from vime.outputs import temporary_folder
from vime.settings.machine import Node
from vime.settings.placement import Demand, NoRoom, place

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
        self._demand, self._num_producers = demand, num_producers
        self._object_store_bytes = None if carries_samples else OBJECT_STORE_BYTES
        self._joined = os.environ.get("RAY_ADDRESS")
        self._gpus = visible_gpus()
        if not self._joined:
            placed([Node(platform.node() or "this machine", self._gpus or cpu_slots())], demand)
        self._exits = ExitStack()
        self.host = "127.0.0.1"
        """Address of this node, as the run's other processes reach it."""
        self._seats = Seats(demand, room_s)

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _start(self) -> None:
        self.temporary = temporary_folder("vime-ray-")
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
        self._seats.take(nodes)

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
        ranks = self._seats.trainers
        where = ranks[bundle] if bundle < len(ranks) else self.engine_places(bundle - len(ranks))[0]
        return spawn_at(where, actor, *args, env=env)

    def engine_places(self, number: int) -> list[ProcessPlace]:
        """Where the engine's parts run, one for each node that it lies on; its actor runs at the first."""
        return self._seats.of_engine(number)

    async def leave_lost_nodes(self, engine: int | None = None) -> str:
        """See `Seats.leave_lost_nodes`."""
        return await self._seats.leave_lost_nodes(engine)

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
