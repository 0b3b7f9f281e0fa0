"""A rollout producer's process, and the coordinator as it sees it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from functools import partial
from typing import Any

from pipeline.activity import ActivityBoard, ProducerActivity
from pipeline.actors.settings import decode_settings
from pipeline.evaluation.wiring import AnyEvaluator, build_evaluator
from pipeline.forwarders import Forwarders
from pipeline.messages import AcceptReply, AcceptRequest, HeldLease, LeaseReply, decode, encode
from pipeline.parity_probe import probe_engines
from pipeline.process_log import log_to_file
from pipeline.producer import Producer
from pipeline.producer_wiring import build_producer, reward_name
from pipeline.prometheus.exporter import on_loop, start_exporter
from pipeline.rollout_runner import RolloutRunner
from pipeline.run_folder import RunFolder
from pipeline.transports.ray_parts import COORDINATOR_S
from storage.queue_types import GroupReturn
from vime.errors import StalledError
from vime.settings.parse import HookArgs


class ProducerActor:
    """One rollout producer's process."""

    def __init__(
        self, settings: bytes, coordinator: Any, engine_addresses: list[str], number: int, forwarders: list[Any]
    ) -> None:
        """`forwarders` are actors that send its requests for samples; without them it sends them itself."""
        self._settings = decode_settings(settings)
        log_to_file(RunFolder.of(self._settings).log(f"producer_{number}"))
        self._forwarders = Forwarders(forwarders) if forwarders else None
        self._coordinator, self._addresses, self._number = coordinator, engine_addresses, number
        self._producer: Producer | RolloutRunner | None = None
        self._evaluator: AnyEvaluator | None = None
        self._activity = ActivityBoard()

    async def pid(self) -> int:
        return os.getpid()

    async def start(self) -> None:
        """Open the pool, the tokenizer and the engine clients."""
        queue = RayQueueClient(self._coordinator)
        self._producer, self._closers = await build_producer(
            self._settings,
            self._coordinator,
            queue,
            self._addresses,
            self._number,
            self._activity,
            self._forwarders,
        )
        built = await asyncio.to_thread(
            build_evaluator, self._settings, self._producer.gate, len(self._addresses), HookArgs(self._settings)
        )
        if built is not None:
            self._evaluator, closers = built
            self._closers = [*self._closers, *closers]
        read = on_loop(self._producer.stats, "producer")
        folder = RunFolder.of(self._settings)
        exporter, _ = start_exporter(self._settings.logging, folder, "producer", read, self._number)
        if exporter is not None:
            self._closers = [*self._closers, partial(asyncio.to_thread, exporter.close)]

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

    async def engine_moved(self, address: str, now_at: str) -> None:
        self._started().gate.engines.move(address, now_at)

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

    async def evaluation_generated(self, step: int, branch: str) -> None:
        """See `Evaluator.generated`."""
        await self._evaluating().generated(step, branch)

    async def stats(self) -> bytes:
        return encode(self._started().stats())

    async def activity(self) -> bytes:
        """A `ProducerActivity`."""
        gate = self._started().gate
        return encode(ProducerActivity(self._activity.groups(), gate.is_open, reward_name(self._settings)))

    def _evaluating(self) -> AnyEvaluator:
        if self._evaluator is None:
            raise RuntimeError("this run has no evaluation data sets")
        return self._evaluator

    def _started(self) -> Producer | RolloutRunner:
        if self._producer is None:
            raise RuntimeError("start() has not been called")
        return self._producer


class RayQueueClient:
    """The coordinator as a producer sees it."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def lease(self, worker_id: str, max_groups: int, policy_version: int) -> LeaseReply:
        return decode(await _answered(self._actor.lease.remote(worker_id, max_groups, policy_version)), LeaseReply)

    async def epoch(self) -> int:
        number: int = await _answered(self._actor.epoch.remote())
        return number

    async def take_over(self, worker_id: str, held: list[HeldLease]) -> list[bytes | None]:
        taken: list[bytes | None] = await _answered(self._actor.take_over.remote(worker_id, encode(held)))
        return taken

    async def heartbeat(self, leases: list[bytes]) -> list[bool]:
        alive: list[bool] = await _answered(self._actor.heartbeat.remote(leases))
        return alive

    async def accept(self, requests: list[AcceptRequest]) -> list[AcceptReply]:
        return decode(await _answered(self._actor.accept.remote(encode(requests))), list[AcceptReply])

    async def release(self, group_index: int, lease: bytes, reason: str) -> None:
        await _answered(self._actor.release.remote(group_index, lease, reason))

    async def yield_groups(self, returns: list[GroupReturn]) -> list[bool]:
        done: list[bool] = await _answered(self._actor.yield_groups.remote(encode(returns)))
        return done

    async def drop(self, group_index: int, lease: bytes, reason: str) -> None:
        await _answered(self._actor.drop.remote(group_index, lease, reason))


async def _answered(reference: Awaitable[Any]) -> Any:
    """The coordinator's answer, of its successor where it has to start again. Raises `StalledError` without one."""
    try:
        async with asyncio.timeout(COORDINATOR_S):
            return await reference
    except TimeoutError as error:
        raise StalledError(
            f"The queue coordinator did not answer a producer within {COORDINATOR_S:g} s.",
            next_step="Look at its log in the run folder. The same command resumes.",
        ) from error
