"""Ray's view of the processes: thin actors that decode bytes, call the plain classes, and encode the answer."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import ray

from pipeline.coordinator import Coordinator, CoordinatorConfig, open_coordinator
from pipeline.evaluation.wiring import AnyEvaluator, build_evaluator
from pipeline.forwarders import Forwarders
from pipeline.messages import AcceptReply, AcceptRequest, LeaseReply, decode, encode
from pipeline.node_devices import ProcessPlace, spawn_at
from pipeline.parity_probe import ProbeSequence, probe_engines
from pipeline.planner import BatchPlan
from pipeline.process_log import log_to_file
from pipeline.producer import Producer
from pipeline.producer_wiring import build_producer
from pipeline.prompt_source import build_prompt_source
from pipeline.rollout_runner import RolloutRunner
from pipeline.run_folder import RunFolder
from pipeline.transports.memory import open_memory_coordinator
from pipeline.transports.ray_parts import CoordinatorParts
from pipeline.wiring import (
    build_engine_server,
    build_trainer_worker,
    create_or_open_pool,
    engine_columns,
    open_bounded_pool,
)
from recovery.commit import QueueState
from storage.positions import PositionRanges
from storage.queue_types import GroupReturn
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.engine_needs import check_engine
from vime.backends.vllm_utils.launch import EnginePart
from vime.backends.vllm_utils.server import EngineServer
from vime.errors import VimeError
from vime.settings.groups import Settings
from vime.settings.parse import HookArgs
from vime.settings.served_models import EngineSpec

if TYPE_CHECKING:
    from pipeline.trainer_worker import TrainerWorker

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

PORT_MARGIN_S = 10.0
"""What a process that ends may keep its port beyond the time that it has to clean up."""


def encode_settings(settings: Settings) -> bytes:
    return msgspec.msgpack.encode(settings)


def _decode_settings(content: bytes) -> Settings:
    return msgspec.msgpack.decode(content, type=Settings)


class CoordinatorActor:
    """The queue coordinator's process. A queue on disk recovers from its journal when Ray restarts it."""

    def __init__(self, settings: bytes, config: bytes) -> None:
        decoded = _decode_settings(settings)
        folder = RunFolder.of(decoded)
        log_to_file(folder.log("coordinator"))
        self._parts = CoordinatorParts()
        self._house: asyncio.Task[None] | None = None
        self._coordinator: Coordinator | VimeError
        try:
            self._coordinator = self._open(decoded, folder, decode(config, CoordinatorConfig))
        except VimeError as error:
            # Of an error in here Ray would tell that the actor died; so each call tells what it was.
            logger.exception("the queue can't be opened")
            self._coordinator = error

    async def pid(self) -> int:
        """Its process id; raises what went wrong when the queue was opened, as all calls do."""
        self._opened()
        return os.getpid()

    async def watch(self) -> None:
        """Never returns; its caller learns when the process dies."""
        await asyncio.Event().wait()

    async def lease(self, worker_id: str, max_groups: int, policy_version: int) -> bytes:
        return encode(self._opened().lease(worker_id, max_groups, policy_version))

    async def heartbeat(self, leases: list[bytes]) -> list[bool]:
        return self._opened().heartbeat(leases)

    async def accept(self, requests: bytes) -> bytes:
        return encode(await self._opened().accept(decode(requests, list[AcceptRequest])))

    async def release(self, group_index: int, lease: bytes, reason: str) -> None:
        self._opened().release(group_index, lease, reason)

    async def yield_groups(self, returns: bytes) -> list[bool]:
        return self._opened().yield_groups(decode(returns, list[GroupReturn]))

    async def drop(self, group_index: int, lease: bytes, reason: str) -> None:
        self._opened().drop(group_index, lease, reason)

    async def wait_for_groups(self, count: int, timeout_s: float) -> bytes | None:
        groups = await self._opened().wait_for_groups(count, timeout_s)
        return None if groups is None else encode(groups)

    async def record_plan(self, batch_id: str, positions: list[int], plan: bytes) -> None:
        self._opened().record_plan(batch_id, positions, plan)

    async def training_completed(self, rollout_id: int, policy_version: int, positions: list[int]) -> None:
        self._opened().training_completed(rollout_id, policy_version, positions)

    async def keep_version(self, policy_version: int) -> None:
        self._opened().keep_version(policy_version)

    async def identity(self) -> bytes:
        return encode(self._opened().identity())

    async def counts(self) -> bytes:
        return encode(self._opened().counts())

    async def highest_version(self) -> int:
        return self._opened().highest_version()

    async def save_prompt_source(self, rollout_id: int) -> None:
        self._opened().save_prompt_source(rollout_id)

    async def queue_state(self) -> bytes:
        return encode(self._opened().queue_state())

    async def rotate(self, committed: bytes, released: list[tuple[int, int]]) -> None:
        self._opened().rotate(decode(committed, QueueState), PositionRanges(released))

    async def put_parts(self, references: dict[str, list[Any]]) -> None:
        """Keep references to payloads; see `RayParts`."""
        self._parts.put(references)

    async def get_parts(self, key: str, numbers: list[int]) -> list[Any]:
        return self._parts.get(key, numbers)

    async def release_parts(self, keys: list[str]) -> None:
        self._parts.release(keys)

    async def close(self) -> None:
        if isinstance(self._coordinator, VimeError):
            raise self._coordinator
        if self._house is not None:
            self._house.cancel()
        self._coordinator.close()

    def _open(self, settings: Settings, folder: RunFolder, config: CoordinatorConfig) -> Coordinator:
        source = build_prompt_source(settings)
        if settings.queue.is_in_memory:
            return open_memory_coordinator(
                run_id=settings.queue.rollout_queue_run_id,
                parts=self._parts,
                step_log_folder=folder.step_log,
                source=source,
                config=config,
            )
        return open_coordinator(
            open_pool=lambda: create_or_open_pool(settings),
            source=source,
            owner=f"coordinator of {folder.root}",
            config=config,
        )

    def _opened(self) -> Coordinator:
        """The coordinator, with its housekeeping under way; raises what went wrong with either."""
        if isinstance(self._coordinator, VimeError):
            raise self._coordinator
        if self._house is None:
            self._house = asyncio.create_task(self._coordinator.keep_house())
        if self._house.done() and not self._house.cancelled():
            self._house.result()
        return self._coordinator


class EngineActor:
    """Holds one inference engine's subprocess, and the actors of those on further nodes."""

    def __init__(self, settings: bytes, number: int, engine: bytes) -> None:
        """`engine` is an `EngineSpec`, and the places of the engine's parts, one for each node.

        This process is at the first.
        """
        decoded = _decode_settings(settings)
        folder = RunFolder.of(decoded)
        log_to_file(folder.log(f"engine_{number}_actor"))
        spec, (first, *others) = decode(engine, tuple[EngineSpec, list[ProcessPlace]])
        parts = _engine_parts(first.address, 1 + len(others))
        self._server = build_engine_server(decoded, folder, number, spec, host=first.address, part=parts[0])
        self._others = [
            spawn_at(place, EnginePartActor, settings, number, encode((spec, place, part)))
            for place, part in zip(others, parts[1:], strict=True)
        ]
        self._port_timeout_s = decoded.engine.rollout_cleanup_timeout + PORT_MARGIN_S
        self._needs = engine_columns(decoded, spec)
        self._sleeps = decoded.cluster.engines_leave_memory
        self._progress = "not started"

    async def start(self, port: int = 0) -> str:
        """Start the engine, wait until it answers, and check that it can do what the run needs; its base URL.

        `port` is that of a process before it, which may take its time to end; 0 lets the system choose.
        """
        await asyncio.to_thread(self._server.start, port=port, port_timeout_s=self._port_timeout_s if port else 0.0)
        await asyncio.gather(*(part.start.remote() for part in self._others))
        await asyncio.to_thread(self._server.wait_ready, self._note_progress)
        async with EngineClient(self._server.address) as client:
            check_engine(self._server.address, await client.capabilities(), self._needs, sleeps=self._sleeps)
        return self._server.address

    async def progress(self) -> str:
        """What the start is at, in words."""
        return self._progress

    async def pids(self) -> list[int]:
        """This process and the engine's, on this node."""
        return [os.getpid(), *([self._server.pid] if self._server.pid is not None else [])]

    async def watch(self) -> int:
        """Returns the engine's exit status when it ends, or its part on another node."""
        ends = (_ended(self._server), *(part.watch.remote() for part in self._others))
        watching = [asyncio.ensure_future(end) for end in ends]
        ended, running = await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            task.cancel()
        return int(ended.pop().result())

    async def stop(self) -> None:
        stopping = [asyncio.ensure_future(part.stop.remote()) for part in self._others]
        await asyncio.to_thread(self._server.stop)
        if stopping:
            await asyncio.wait(stopping)

    def _note_progress(self, phase: str, seconds: float) -> None:
        self._progress = f"{phase}, {seconds:.0f} s"


class EnginePartActor:
    """Holds the workers of an engine on one of its further nodes. It ends with the engine's own actor."""

    def __init__(self, settings: bytes, number: int, place: bytes) -> None:
        """`place` is the `EngineSpec`, a `ProcessPlace` and an `EnginePart`."""
        decoded = _decode_settings(settings)
        folder = RunFolder.of(decoded)
        spec, here, part = decode(place, tuple[EngineSpec, ProcessPlace, EnginePart])
        log_to_file(folder.log(f"engine_{number}_part_{part.number}_actor"))
        self._server = build_engine_server(decoded, folder, number, spec, host=here.address, part=part)

    async def start(self) -> None:
        """Start the workers, which wait for the first node's."""
        self._server.start()

    async def watch(self) -> int:
        """Returns the workers' exit status when they end."""
        return await _ended(self._server)

    async def stop(self) -> None:
        await asyncio.to_thread(self._server.stop)


async def _ended(server: EngineServer) -> int:
    """The exit status of an engine's process on this node, when it ends."""
    while (status := server.poll()) is None:
        await asyncio.sleep(0.25)
    return status


def _engine_parts(address: str, num_parts: int) -> list[EnginePart | None]:
    """What tells the parts of an engine apart; an engine on one node has none."""
    if num_parts == 1:
        return [None]
    with socket.socket() as probe:
        probe.bind((address, 0))
        port = int(probe.getsockname()[1])
    return [EnginePart(number, num_parts, address, port) for number in range(num_parts)]


class ProducerActor:
    """One rollout producer's process."""

    def __init__(
        self, settings: bytes, coordinator: Any, engine_addresses: list[str], number: int, forwarders: list[Any]
    ) -> None:
        """`forwarders` are actors that send its requests for samples; without them it sends them itself."""
        self._settings = _decode_settings(settings)
        log_to_file(RunFolder.of(self._settings).log(f"producer_{number}"))
        self._forwarders = Forwarders(forwarders) if forwarders else None
        self._coordinator, self._addresses, self._number = coordinator, engine_addresses, number
        self._producer: Producer | RolloutRunner | None = None
        self._evaluator: AnyEvaluator | None = None

    async def pid(self) -> int:
        return os.getpid()

    async def start(self) -> None:
        """Open the pool, the tokenizer and the engine clients."""
        queue = RayQueueClient(self._coordinator)
        self._producer, self._closers = await build_producer(
            self._settings, self._coordinator, queue, self._addresses, self._number, self._forwarders
        )
        built = await asyncio.to_thread(
            build_evaluator, self._settings, self._producer.gate, len(self._addresses), HookArgs(self._settings)
        )
        if built is not None:
            self._evaluator, closers = built
            self._closers = [*self._closers, *closers]

    async def run(self) -> None:
        """Produce until stopped; raises what went wrong."""
        try:
            await self._started().run()
        finally:
            for close in self._closers:
                await close()

    async def pause_admission(self) -> None:
        self._started().gate.pause()

    async def resume_admission(self, policy_version: int, serving: list[str]) -> None:
        self._started().gate.resume(policy_version, serving)

    async def serve_only(self, serving: list[str]) -> None:
        self._started().gate.serve_only(serving)

    async def suspects(self) -> list[str]:
        """See `ServingEngines.suspects`."""
        return await self._started().gate.engines.suspects()

    async def stop(self) -> None:
        self._started().stop()

    async def probe(self, addresses: list[str]) -> bytes:
        """See `probe_engines`."""
        return encode(await probe_engines(self._settings, addresses))

    async def evaluate(self, step: int, branch: str) -> bytes:
        """See `Evaluator.evaluate`."""
        return encode(await self._evaluating().evaluate(step, branch))

    async def evaluation_generated(self, step: int) -> None:
        """See `Evaluator.generated`."""
        await self._evaluating().generated(step)

    async def stats(self) -> bytes:
        return encode(self._started().stats())

    def _evaluating(self) -> AnyEvaluator:
        if self._evaluator is None:
            raise RuntimeError("this run has no evaluation data sets")
        return self._evaluator

    def _started(self) -> Producer | RolloutRunner:
        if self._producer is None:
            raise RuntimeError("start() has not been called")
        return self._producer


class TrainerActor:
    """One trainer rank's process. The model lives on one thread; control calls don't wait for it."""

    def __init__(self, settings: bytes, rank: int) -> None:
        self._settings, self._rank = _decode_settings(settings), rank
        self._folder = RunFolder.of(self._settings)
        log_to_file(self._folder.log(f"trainer_{rank}"))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        self._built: TrainerWorker | None = None

    async def pid(self) -> int:
        return os.getpid()

    async def watch(self) -> None:
        """Never returns; its caller learns when the process dies."""
        await asyncio.Event().wait()

    async def rendezvous(self) -> str:
        """An address at which the ranks can meet (asked of rank 0)."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    async def build(self, init_method: str, world_size: int, coordinator: Any) -> int:
        """Join the other ranks and build model and optimizer; the data-parallel size."""

        def build() -> int:
            pool = open_bounded_pool(self._settings, coordinator)
            self._built = build_trainer_worker(self._settings, self._folder, pool, self._rank, world_size, init_method)
            return self._built.data_parallel_size

        return await self._on_thread(build)

    async def load_hf(self) -> None:
        """See `TrainerWorker.load_hf`."""
        await self._on_thread(lambda: self._worker.load_hf())

    async def load_start(self) -> None:
        await self._on_thread(lambda: self._worker.load_start())

    async def load(self, directory: str, rollout_id: int) -> None:
        await self._on_thread(lambda: self._worker.load(Path(directory), rollout_id))

    async def save(self, directory: str, rollout_id: int) -> None:
        await self._on_thread(lambda: self._worker.save(Path(directory), rollout_id))

    async def save_hf(self, directory: str) -> None:
        await self._on_thread(lambda: self._worker.save_hf(Path(directory)))

    async def train(self, plan: bytes) -> bytes:
        return encode(await self._on_thread(lambda: self._worker.train(decode(plan, BatchPlan))))

    async def probe(self, sequences: bytes, start_weights: bool) -> bytes:
        """See `TrainerWorker.probe`."""
        decoded = decode(sequences, list[ProbeSequence])
        return encode(await self._on_thread(lambda: self._worker.probe(decoded, start_weights=start_weights)))

    async def rest(self) -> None:
        await self._on_thread(lambda: self._worker.rest())

    async def open_sender(self, engine_names: list[str], timeout_s: float) -> list[dict[str, object]]:
        address = ray.util.get_node_ip_address()
        return await self._on_thread(lambda: self._worker.weights.open_sender(address, engine_names, timeout_s))

    async def connect_sender(self) -> None:
        await self._on_thread(lambda: self._worker.weights.connect_sender())

    async def send_weights(self) -> int:
        return await self._on_thread(lambda: self._worker.weights.send())

    async def highest_version_on_disk(self) -> int:
        return await self._on_thread(lambda: self._worker.weights.highest_version())

    async def write_version(self, version: int, full: bool) -> bytes:
        return encode(await self._on_thread(lambda: self._worker.weights.write_version(version, full=full)))

    async def run_post_write_hook(self, folder: str, engine_names: list[str]) -> None:
        await self._on_thread(lambda: self._worker.weights.run_post_write_hook(folder, engine_names))

    async def remove_version(self, version: int) -> None:
        await self._on_thread(lambda: self._worker.weights.remove_version(version))

    async def share_next_part(self, version: int) -> dict[str, object] | None:
        return await self._on_thread(lambda: self._worker.weights.share_next_part(version))

    async def follow_sharing(self) -> None:
        await self._on_thread(lambda: self._worker.weights.follow_sharing())

    async def stop_sharing(self) -> None:
        await self._on_thread(lambda: self._worker.weights.stop_sharing())

    async def close(self) -> None:
        """Also of a rank that was not built, because the start failed before."""
        if self._built is not None:
            await self._on_thread(self._built.close)
        self._thread.shutdown()

    @property
    def _worker(self) -> TrainerWorker:
        if self._built is None:
            raise RuntimeError("build() has not been called")
        return self._built

    async def _on_thread(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class RayQueueClient:
    """The coordinator as a producer sees it."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def lease(self, worker_id: str, max_groups: int, policy_version: int) -> LeaseReply:
        return decode(await self._actor.lease.remote(worker_id, max_groups, policy_version), LeaseReply)

    async def heartbeat(self, leases: list[bytes]) -> list[bool]:
        alive: list[bool] = await self._actor.heartbeat.remote(leases)
        return alive

    async def accept(self, requests: list[AcceptRequest]) -> list[AcceptReply]:
        return decode(await self._actor.accept.remote(encode(requests)), list[AcceptReply])

    async def release(self, group_index: int, lease: bytes, reason: str) -> None:
        await self._actor.release.remote(group_index, lease, reason)

    async def yield_groups(self, returns: list[GroupReturn]) -> list[bool]:
        done: list[bool] = await self._actor.yield_groups.remote(encode(returns))
        return done

    async def drop(self, group_index: int, lease: bytes, reason: str) -> None:
        await self._actor.drop.remote(group_index, lease, reason)
