"""The processes of a run as the driver sees them: started together, watched, and stopped in order."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from pipeline.actors.producer import ProducerActor
from pipeline.actors.settings import encode_settings
from pipeline.cluster import CONTROL_S, Cluster, answer, closed
from pipeline.coordinator_handle import CoordinatorHandle
from pipeline.engine_group import EngineGroup
from pipeline.engine_health import EngineKeeper, Fences
from pipeline.engine_process import STOP_MARGIN_S
from pipeline.evaluation.records import EvaluationRecord
from pipeline.forwarders import ForwarderActor
from pipeline.kept_engines import end_claims
from pipeline.messages import ProducerStats, QueueCounts, TrainReport, decode, encode
from pipeline.node_moves import NodeMoves
from pipeline.probe_sequence import ProbeSequence
from pipeline.process_watch import ProcessWatch
from pipeline.producer_group import ProducerGroup
from pipeline.producer_wiring import worker_name
from pipeline.run_folder import RunFolder
from pipeline.trainer_group import STOP_TIMEOUT_S, TrainerGroup
from storage.files import write_atomically
from vime.errors import ProcessDiedError, RunFailedError, StorageError, VimeError
from vime.settings.groups import Settings

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class Workers:
    """Handles of all actors, their watchers, and the calls that the run loop makes."""

    def __init__(
        self, settings: Settings, folder: RunFolder, cluster: Cluster, note: Callable[[str], None] = logger.warning
    ) -> None:
        """`note` is told of engines that fail and are replaced."""
        self.settings, self._folder, self._cluster, self._note = settings, folder, cluster, note
        self.watch = ProcessWatch(folder.log)
        moves = NodeMoves(cluster, folder.queue, settings.queue, note)
        self.engines = EngineGroup(settings, folder, cluster, self.watch, moves, note, self.record_processes)
        self.queue = CoordinatorHandle(
            encode_settings(settings), cluster, self.watch, in_memory=settings.queue.is_in_memory
        )
        self.trainers = TrainerGroup(settings, cluster, self.watch, moves.leave_lost_nodes)
        self.producers = ProducerGroup(
            self._spawn_producer,
            lambda actor: cluster.end(actor),
            self._retire_producer,
            note,
            self.record_processes,
            max_restarts=settings.queue.max_process_restarts,
        )
        self._forwarders: list[Any] = []
        self._followers: list[asyncio.Task[None]] = []

    async def start_routers(self) -> None:
        """See `EngineGroup.start_routers`; the settings know them from now on."""
        self.settings = self.settings.with_routers(await self.engines.start_routers())

    def keep_engines(
        self,
        fences: Fences,
        frozen_anew: Callable[[str, str], Awaitable[None]],
        tell_frozen: Callable[[str, Mapping[str, str]], None],
    ) -> None:
        """See `EngineGroup.keep`. Engines that fail a producer's requests are checked at once."""
        self.engines.keep(fences, frozen_anew, tell_frozen, self._engine_moved)
        if (keeper := self.engines.keeper) is not None:
            for number in range(len(self.producers.actors)):
                self._followers.append(asyncio.create_task(self._follow_suspicions(number, keeper)))

    async def start_trainers(self) -> int:
        """See `TrainerGroup.start`."""
        return await self.trainers.start(self.queue.actor)

    async def start_producers(self) -> None:
        """Start the producers; they generate nothing before admission is resumed."""
        if self.settings.rollout.use_distributed_post:
            self._forwarders = self._cluster.spawn_everywhere(ForwarderActor)
        await self.producers.start(self.settings.queue.rollout_num_producers)
        for number in range(len(self.producers.actors)):
            self.watch.add(f"producer_{number}", self.producers.keep(number))

    async def record_processes(self) -> None:
        """Write the ids of all processes into the run folder, for those who look for what a session has left."""
        ids = {
            "driver": os.getpid(),
            "coordinator": await self._pid(self.queue.actor),
            "trainers": [await self._pid(trainer) for trainer in self.trainers.ranks],
            "engines": [await engine.pids() for engine in self.engines.processes],
            "routers": self.engines.routers.pids,
            "producers": [await self._pid(producer) for producer in self.producers.actors],
            "ray_folder": str(self._cluster.temporary),
        }
        try:
            write_atomically(self._folder.processes, json.dumps(ids, indent=1).encode())
        except StorageError as error:
            self._note(f"warning: the ids of the processes were not kept: {error}")

    async def guarded(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """See `ProcessWatch.guarded`."""
        return await self.watch.guarded(work)

    async def probe_engines(self, addresses: list[str]) -> list[list[ProbeSequence]]:
        """A few sequences of each of these engines; see `pipeline.parity_probe`."""
        probed = await self.producers.ask(0, lambda producer: producer.probe.remote(addresses))
        return decode(probed, list[list[ProbeSequence]])

    async def score_probe(self, sequences: Sequence[ProbeSequence], start_weights: bool) -> dict[str, list[float]]:
        """The trainer's scores of them."""
        content = encode(sequences)
        scores = await self.trainers.probe(content, start_weights)
        return decode(scores[0], dict[str, list[float]])

    async def train(self, content: bytes) -> list[TrainReport]:
        reports = await self.on_trainers(lambda trainer: trainer.train.remote(content))
        return [decode(report, TrainReport) for report in reports]

    async def rest_trainers(self) -> None:
        """Let the ranks leave their devices' memory until they are needed again."""
        await self.trainers.rest()

    async def stats(self) -> list[ProducerStats]:
        """Of the producers that live."""
        contents = await self.producers.ask_all(lambda producer: producer.stats.remote())
        return [decode(content, ProducerStats) for content in contents]

    async def counts_and_stats(self) -> tuple[QueueCounts, list[ProducerStats]]:
        """Both at one moment."""
        return await asyncio.gather(self.queue.counts(), self.stats())

    async def evaluate(self, step: int, branch: str) -> EvaluationRecord:
        """The first producer evaluates the policy that serves; see `Evaluator`."""
        evaluated = await self.producers.ask(0, lambda producer: producer.evaluate.remote(step, branch))
        return decode(evaluated, EvaluationRecord)

    async def evaluation_generated(self, step: int, branch: str) -> None:
        """Returns when every response of an evaluation is there, also of one that begins after this was asked."""
        await self.producers.ask(0, lambda producer: producer.evaluation_generated.remote(step, branch))

    async def on_trainers(self, call: Callable[[Any], Awaitable[Any]]) -> list[Any]:
        """The same call on every rank, at once."""
        return await self.trainers.on_all(call)

    # The producers' side of a publication.

    async def pause_admission(self) -> None:
        await self.producers.pause_admission()

    async def resume_admission(self, policy_version: int, serving: list[str]) -> None:
        await self.engines.serve_only(serving)
        await self.producers.resume_admission(policy_version, serving)

    async def serve_only(self, serving: list[str]) -> None:
        await self.engines.serve_only(serving)
        await self.producers.serve_only(serving)

    async def stop_producers(self) -> VimeError | None:
        """Finished groups are published, unfinished ones go back; the queue is at rest when this returns.

        Returns what a producer failed with: what was trained can be committed all the same.
        """
        runs = self.watch.named("producer")
        await self.producers.ask_to_stop()
        if runs:
            await asyncio.wait(runs, timeout=STOP_TIMEOUT_S)
        failures = [self.watch.failure_of(task) for task in runs]
        return next((failure for failure in failures if failure is not None), None)

    async def stop(self, *, keeps_engines: bool = False) -> None:
        """Stop what runs; what fails to stop is named in a warning and ended with Ray.

        With `keeps_engines` those that can outlive the driver go on, for a restarted one.
        """
        for task in self._followers:
            task.cancel()
        await asyncio.gather(*self._followers, return_exceptions=True)
        await self.watch.close()
        ending = [engine for engine in self.engines.processes if not (keeps_engines and engine.is_kept)]
        engines = {engine.name: engine.actor.stop.remote() for engine in ending}
        others = {f"trainer rank {rank}": trainer.close.remote() for rank, trainer in enumerate(self.trainers.ranks)}
        if self.queue.actor is not None:
            others["the queue coordinator"] = self.queue.actor.close.remote()
        cleanup_s = self.settings.engine.rollout_cleanup_timeout + STOP_MARGIN_S
        await asyncio.gather(
            _closed_in_time(engines, max(STOP_TIMEOUT_S, cleanup_s)), _closed_in_time(others, STOP_TIMEOUT_S)
        )
        if not keeps_engines:
            await asyncio.to_thread(end_claims, self._folder.kept_engines)
        await self.engines.routers.stop()

    async def _engine_moved(self, address: str, now_at: str) -> None:
        """Have everybody who sends requests find an engine that went to another node."""
        self._note(f"The engine that was at {address} is at {now_at} now.")
        self.engines.moved(address, now_at)
        await self.producers.engine_moved(address, now_at)

    async def _follow_suspicions(self, number: int, keeper: EngineKeeper) -> None:
        """Have engines checked that fail a producer's requests. Ends with the producer, whose end is told elsewhere."""
        with suppress(RunFailedError):
            while True:
                for address in await self.producers.ask(number, lambda producer: producer.suspects.remote()):
                    keeper.suspect(address)

    def _spawn_producer(self, number: int) -> Any:
        encoded, addresses = encode_settings(self.settings), self.engines.trained
        return self._cluster.spawn(ProducerActor, encoded, self.queue.actor, addresses, number, self._forwarders)

    async def _retire_producer(self, number: int) -> None:
        await self.queue.retire(worker_name(number))

    async def _pid(self, actor: Any) -> int | None:
        """None for a process that has died and may be replaced."""
        try:
            return int(await answer(actor.pid.remote(), "a process", within_s=CONTROL_S))
        except ProcessDiedError:
            return None


async def _closed_in_time(closing: Mapping[str, Awaitable[Any]], within_s: float) -> None:
    """Wait for what ends processes, by their names; those that don't end are told."""
    tasks = {asyncio.create_task(closed(reference, name)): name for name, reference in closing.items()}
    late = (await asyncio.wait(tasks, timeout=within_s))[1] if tasks else set()
    for task in late:
        logger.warning("%s did not close within %g s", tasks[task], within_s)
