"""The processes of a run as the driver sees them: started together, watched, and stopped in order."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from pipeline.actors.engine import EngineActor
from pipeline.actors.producer import ProducerActor
from pipeline.actors.settings import encode_settings
from pipeline.cluster import CONTROL_S, Cluster, answer, closed
from pipeline.coordinator_handle import CoordinatorHandle
from pipeline.engine_health import EngineKeeper, Fences, HealthSettings, KeptEngine
from pipeline.engine_process import STOP_MARGIN_S, EngineProcess
from pipeline.evaluation.records import EvaluationRecord
from pipeline.external_engines import ExternalEngine, check_external
from pipeline.forwarders import ForwarderActor
from pipeline.frozen_engines import FencesOfModels, FrozenEngines
from pipeline.kept_engines import end_claims
from pipeline.messages import ProducerStats, QueueCounts, TrainReport, decode, encode
from pipeline.probe_sequence import ProbeSequence
from pipeline.process_watch import ProcessWatch
from pipeline.producer_group import ProducerGroup
from pipeline.producer_wiring import worker_name
from pipeline.prometheus.exporter import write_engine_targets
from pipeline.routers import Routers
from pipeline.run_folder import RunFolder
from pipeline.sample_columns import sample_columns
from pipeline.storage_proof import prove_nodes
from pipeline.trainer_group import STOP_TIMEOUT_S, TrainerGroup
from storage.files import write_atomically
from vime.backends.vllm_utils.startup_log import last_lines
from vime.counted import counted
from vime.errors import ProcessDiedError, RunFailedError, StorageError, VimeError
from vime.settings.groups import Settings
from vime.settings.rules.quantities import engines_are_others, own_engines
from vime.settings.served_models import EngineSpec, model_names

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

PROGRESS_S = 2.0


def _as_it_is(engine: KeptEngine) -> KeptEngine:
    return engine


class Workers:
    """Handles of all actors, their watchers, and the calls that the run loop makes."""

    def __init__(
        self, settings: Settings, folder: RunFolder, cluster: Cluster, note: Callable[[str], None] = logger.warning
    ) -> None:
        """`note` is told of engines that fail and are replaced."""
        self.settings, self._folder, self._cluster, self._note = settings, folder, cluster, note
        encoded = encode_settings(settings)
        num_ranks = settings.cluster.num_trainer_ranks
        self._encoded = encoded
        self.engines = [
            self._engine(number, spec, num_ranks)
            for number, spec in enumerate(own_engines(settings))
            if spec.kind != "placeholder"
        ]
        self.routers = Routers(settings, folder, note, self.record_processes)
        self._models = model_names(settings)
        self._addresses: dict[str, list[str]] = {name: [] for name in self._models}
        """Served model, the trained one first -> base URLs of its engines."""
        self.keeper: EngineKeeper | None = None
        """Who replaces engines, in a run that does, once they have started."""
        self.watch = ProcessWatch(folder.log)
        self.queue = CoordinatorHandle(encoded, cluster, self.watch, in_memory=settings.queue.is_in_memory)
        self.trainers = TrainerGroup(settings, cluster, self.watch, self._leave_lost_nodes)
        self.producers = ProducerGroup(
            self._spawn_producer,
            lambda actor: cluster.end(actor),
            self._retire_producer,
            note,
            self.record_processes,
            max_restarts=settings.queue.max_process_restarts,
        )
        self._engine_addresses: list[str] = []
        self._unproven: set[int | None] = set()
        """Engines, None for the trainer, that have gone to a node which is not known to see the queue's folder."""
        self._forwarders: list[Any] = []
        self._followers: list[asyncio.Task[None]] = []

    async def start_engines(
        self, report: Callable[[str], None], kept: Callable[[KeptEngine], KeptEngine] = _as_it_is
    ) -> list[str]:
        """Start all engines; base URLs of those that are trained. `report` is told what they are at.

        `kept` is how the keeper sees an engine. Those of other models serve at once, through their routers.
        """
        starting = asyncio.gather(*(engine.start() for engine in self.engines))
        try:
            while not (await asyncio.wait([starting], timeout=PROGRESS_S))[0]:
                phases = [await engine.progress() for engine in self.engines]
                report("; ".join(f"engine {number}: {phase}" for number, phase in enumerate(phases)))
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        starting.result()
        if engines_are_others(self.settings):
            return await self._join_engines(report)
        if self.settings.engine.use_fault_tolerance and self.engines:
            self.keeper = EngineKeeper([kept(engine) for engine in self.engines], _health(self.settings), self._note)
        else:
            for number, engine in enumerate(self.engines):
                self.watch.add(f"engine_{number}", engine.actor.watch.remote())
        self._addresses = {
            name: [engine.address for engine in self.engines if engine.model == name] for name in self._models
        }
        for name in self._models[1:]:
            await self.routers.set(name, self._addresses[name], self._addresses[name])
        return self._addresses[self._models[0]]

    async def take_over_engines(self) -> int | None:
        """Take over engines that outlived a driver before; the highest version that one of them holds.

        They serve nothing until they confirm a version, as new ones. Those that can't be used are ended. None without
        one that was taken over.
        """
        kept = [engine for engine in self.engines if engine.is_kept]
        taken = await asyncio.gather(*(engine.take_over() for engine in kept))
        for engine, found in zip(kept, taken, strict=True):
            if found.why_not:
                self._note(f"{engine.name[0].upper()}{engine.name[1:]} was kept, and is replaced: {found.why_not}.")
        versions = [found.version for found in taken if found.version is not None]
        if versions:
            self._note(
                f"{counted(len(versions), 'engine')} kept from the session before, with version {max(versions)}."
            )
        return max(versions, default=None)

    @property
    def trained_model(self) -> str:
        """Its name."""
        return self._models[0]

    @property
    def frozen(self) -> list[str]:
        """Base URLs of the engines that aren't trained, once all have started."""
        return [address for name in self._models[1:] for address in self._addresses[name]]

    @property
    def taken_over(self) -> set[str]:
        """Base URLs of the engines that were taken over, once all have started."""
        return {engine.address for engine in self.engines if engine.is_taken_over}

    @property
    def has_engines(self) -> bool:
        """Whether samples come from engines, once they have started."""
        return any(self._addresses.values())

    async def start_routers(self) -> None:
        """Start a router for each model; an engine is its worker when it has confirmed a version."""
        if not self.engines and not engines_are_others(self.settings):
            return
        await self.routers.start(self._models, self._cluster.host)
        self.settings = self.settings.with_routers(self.routers.of_models)
        for router in self.routers.of_models:
            self._note(f"Router of {router.model}: http://{router.host}:{router.port}")
        self.watch.add("router", self.routers.keep())

    async def _join_engines(self, report: Callable[[str], None]) -> list[str]:
        """Base URLs of engines that others started, checked; they get no requests before they confirm a version."""
        given, trained = self.settings.engine.rollout_external_engine_addrs, self._models[0]
        if given is not None:
            addresses = [f"http://{address}" for address in given]
        else:
            addresses = await self.routers.registered(trained, report)
        self._addresses[trained] = addresses
        await self._serve_only(trained, [])
        await check_external(addresses, sample_columns(self.settings))
        if self.settings.engine.use_fault_tolerance:
            engines = [ExternalEngine(number, address) for number, address in enumerate(addresses)]
            self.keeper = EngineKeeper(engines, _health(self.settings), self._note)
        return addresses

    def keep_engines(
        self,
        fences: Fences,
        frozen_anew: Callable[[str, str], Awaitable[None]],
        tell_frozen: Callable[[str, Mapping[str, str]], None],
    ) -> None:
        """From now on engines that fail are fenced and replaced, where the settings ask for it.

        Of the models that aren't trained, `frozen_anew` is told where an engine was and is, before it gets requests
        again, and `tell_frozen` which engines of a model get none, and why.
        """
        if self.keeper is None:
            return
        by_address: dict[str, Fences] = {}
        for name in self._models[1:]:
            frozen = FrozenEngines(
                self._addresses[name], partial(self._serve_only, name), frozen_anew, partial(tell_frozen, name)
            )
            by_address |= dict.fromkeys(self._addresses[name], frozen)
        self.watch.add("engines", self.keeper.run(FencesOfModels(fences, by_address, self._engine_moved)))
        for number in range(len(self.producers.actors)):
            self._followers.append(asyncio.create_task(self._follow_suspicions(number, self.keeper)))

    async def start_trainers(self) -> int:
        """See `TrainerGroup.start`."""
        return await self.trainers.start(self.queue.actor)

    async def start_producers(self, engine_addresses: list[str]) -> None:
        """Start the producers; they generate nothing before admission is resumed."""
        self._engine_addresses = engine_addresses
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
            "engines": [await engine.pids() for engine in self.engines],
            "routers": self.routers.pids,
            "producers": [await self._pid(producer) for producer in self.producers.actors],
            "ray_folder": str(self._cluster.temporary),
        }
        try:
            write_atomically(self._folder.processes, json.dumps(ids, indent=1).encode())
        except StorageError as error:
            self._note(f"warning: the ids of the processes were not kept: {error}")

    def write_engine_targets(self) -> None:
        """Tell Prometheus where the engines of all models are, once they have started."""
        named = {engine.name.replace(" ", "_"): engine.address for engine in self.engines}
        of_others = {f"engine_{number}": address for number, address in enumerate(self._addresses[self.trained_model])}
        write_engine_targets(self.settings.logging, self._folder, named or of_others)

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
        await self._serve_only(self._models[0], serving)
        await self.producers.resume_admission(policy_version, serving)

    async def serve_only(self, serving: list[str]) -> None:
        await self._serve_only(self._models[0], serving)
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
        ending = [engine for engine in self.engines if not (keeps_engines and engine.is_kept)]
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
        await self.routers.stop()

    async def _serve_only(self, model: str, serving: Collection[str]) -> None:
        await self.routers.set(model, self._addresses[model], serving)

    async def _engine_moved(self, address: str, now_at: str) -> None:
        """Have everybody who sends requests find an engine that went to another node."""
        self._note(f"The engine that was at {address} is at {now_at} now.")
        for addresses in (*self._addresses.values(), self._engine_addresses):
            addresses[:] = [now_at if each == address else each for each in addresses]
        self.write_engine_targets()
        await self.producers.engine_moved(address, now_at)

    async def _leave_lost_nodes(self, engine: int | None = None) -> None:
        """Give the trainer's ranks, or an engine, that have lost their node a place on another one.

        That one must see the queue's folder as all do. Raises `RunFailedError` or `StorageError`.
        """
        moved = await self._cluster.leave_lost_nodes(engine)
        if moved:
            self._note(moved)
            self._unproven.add(engine)
        if engine in self._unproven:
            await prove_nodes(self._folder.queue, self.settings.queue)
            self._unproven.remove(engine)

    def _engine(self, number: int, spec: EngineSpec, num_ranks: int) -> EngineProcess:
        log = self._folder.log(f"engine_{number}")

        def spawn() -> Any:
            what = encode((spec, self._cluster.engine_places(number)))
            return self._cluster.spawn_worker(EngineActor, num_ranks + number, self._encoded, number, what)

        return EngineProcess(
            f"engine {number}",
            spec.model,
            spawn,
            lambda actor: self._cluster.end(actor),
            cleanup_timeout_s=self.settings.engine.rollout_cleanup_timeout,
            log_tail=lambda: last_lines(log),
            on_restart=self.record_processes,
            node=lambda: self._cluster.engine_places(number)[0].node_id,
            leave_lost_node=partial(self._leave_lost_nodes, number),
            is_kept=self.settings.queue.rollout_session_id is not None
            and len(self._cluster.engine_places(number)) == 1,
        )

    async def _follow_suspicions(self, number: int, keeper: EngineKeeper) -> None:
        """Have engines checked that fail a producer's requests. Ends with the producer, whose end is told elsewhere."""
        with suppress(RunFailedError):
            while True:
                for address in await self.producers.ask(number, lambda producer: producer.suspects.remote()):
                    keeper.suspect(address)

    def _spawn_producer(self, number: int) -> Any:
        encoded, addresses = encode_settings(self.settings), self._engine_addresses
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


def _health(settings: Settings) -> HealthSettings:
    engine = settings.engine
    return HealthSettings(
        interval_s=engine.rollout_health_check_interval,
        timeout_s=engine.rollout_health_check_timeout,
        first_wait_s=engine.rollout_health_check_first_wait,
    )
