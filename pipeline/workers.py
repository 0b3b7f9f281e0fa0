"""The processes of a run as the driver sees them: started together, watched, and stopped in order."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from pipeline.actors import CoordinatorActor, EngineActor, ProducerActor, TrainerActor, encode_settings
from pipeline.cluster import Cluster, answer
from pipeline.coordinator import CoordinatorConfig
from pipeline.engine_health import EngineKeeper, Fences, HealthSettings
from pipeline.engine_process import EngineProcess
from pipeline.evaluation.records import EvaluationRecord
from pipeline.external_engines import ExternalEngine, check_external
from pipeline.forwarders import ForwarderActor
from pipeline.frozen_engines import FencesOfModels, FrozenEngines
from pipeline.messages import ProducerStats, QueueCounts, TrainReport, decode, encode
from pipeline.parity_probe import ProbeSequence
from pipeline.planner import BatchPlan
from pipeline.process_log import last_lines
from pipeline.routers import Routers
from pipeline.run_folder import RunFolder
from pipeline.sample_columns import sample_columns
from pipeline.weight_transports.disk import PublishedVersion
from pipeline.wiring import NUM_PRODUCERS
from recovery.accounting import Identity
from recovery.commit import QueueState
from storage.files import write_atomically
from storage.positions import PositionRanges
from storage.queue_types import AcceptedGroup
from vime.errors import RunFailedError, VimeError
from vime.settings.groups import Settings
from vime.settings.rules.quantities import engines_are_others, own_engines
from vime.settings.served_models import EngineSpec, model_names

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

STOP_TIMEOUT_S = 30.0
PROGRESS_S = 2.0
DEATH_S = 2.0
"""How long the end of a process may become known after the first error that it causes."""
COORDINATOR_RESTARTS = 20


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
        self.routers = Routers(settings, folder, note)
        self._models = model_names(settings)
        self._addresses: dict[str, list[str]] = {name: [] for name in self._models}
        """Served model, the trained one first -> base URLs of its engines."""
        self.keeper: EngineKeeper | None = None
        """Who replaces engines, in a run that does, once they have started."""
        self.trainers = self._spawn_trainers()
        self.producers: list[Any] = []
        self.coordinator: Any = None
        self._watchers: dict[asyncio.Task[Any], str] = {}
        self._followers: list[asyncio.Task[None]] = []
        self._following: asyncio.Future[list[None]] | None = None
        """Ranks above 0 that gather with rank 0 while it shares weights."""

    async def start_coordinator(self, config: CoordinatorConfig) -> None:
        """Open the queue. Ray restarts this actor when its process dies, unless its queue dies with it."""
        in_memory = self.settings.queue.is_in_memory
        self.coordinator = self._cluster.spawn(
            CoordinatorActor, self._encoded, encode(config), restarts=0 if in_memory else COORDINATOR_RESTARTS
        )
        await answer(self.coordinator.pid.remote(), "the queue coordinator")
        if in_memory:
            self._watch("coordinator", self.coordinator.watch.remote())

    async def start_engines(self, report: Callable[[str], None]) -> list[str]:
        """Start all engines; base URLs of those that are trained. `report` is told what they are at.

        Those of other models serve at once, through their routers.
        """
        starting = asyncio.gather(*(engine.start() for engine in self.engines))
        try:
            while not (await asyncio.wait([starting], timeout=PROGRESS_S))[0]:
                phases = [await engine.actor.progress.remote() for engine in self.engines]
                report("; ".join(f"engine {number}: {phase}" for number, phase in enumerate(phases)))
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        starting.result()
        if engines_are_others(self.settings):
            return await self._join_engines(report)
        if self.settings.engine.use_fault_tolerance and self.engines:
            self.keeper = EngineKeeper(self.engines, _health(self.settings), self._note)
        else:
            for number, engine in enumerate(self.engines):
                self._watch(f"engine_{number}", engine.actor.watch.remote())
        self._addresses = {
            name: [engine.address for engine in self.engines if engine.model == name] for name in self._models
        }
        for name in self._models[1:]:
            await self.routers.set(name, self._addresses[name], self._addresses[name])
        return self._addresses[self._models[0]]

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
        self._watch("router", self.routers.watch())

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

    def keep_engines(self, fences: Fences) -> None:
        """From now on engines that fail are fenced and replaced, where the settings ask for it."""
        if self.keeper is None:
            return
        by_address: dict[str, Fences] = {}
        for name in self._models[1:]:
            frozen = FrozenEngines(self._addresses[name], partial(self._serve_only, name))
            by_address |= dict.fromkeys(self._addresses[name], frozen)
        self._watch("engines", self.keeper.run(FencesOfModels(fences, by_address)))
        for producer in self.producers:
            following = asyncio.create_task(self._follow_suspicions(producer, self.keeper))
            self._followers.append(following)

    async def start_trainers(self) -> int:
        """Build the ranks' models, in new processes after `release_trainers`; the data-parallel size."""
        if not self.trainers:
            self.trainers = self._spawn_trainers()
        init_method = await answer(self.trainers[0].rendezvous.remote(), "trainer rank 0")
        sizes: list[int] = await self.on_trainers(
            lambda trainer: trainer.build.remote(init_method, len(self.trainers), self.coordinator)
        )
        return sizes[0]

    async def start_producers(self, engine_addresses: list[str]) -> None:
        """Start the producers; they generate nothing before admission is resumed."""
        posts_elsewhere = self.settings.rollout.use_distributed_post
        forwarders = self._cluster.spawn_everywhere(ForwarderActor) if posts_elsewhere else []
        content = encode_settings(self.settings)
        self.producers = [
            self._cluster.spawn(ProducerActor, content, self.coordinator, engine_addresses, number, forwarders)
            for number in range(NUM_PRODUCERS)
        ]
        await self._on_producers(lambda producer: producer.start.remote())
        for number, producer in enumerate(self.producers):
            self._watch(f"producer_{number}", producer.run.remote())

    def watch_trainers(self) -> None:
        """From now on a dead rank ends the run."""
        for rank, trainer in enumerate(self.trainers):
            self._watch(f"trainer_{rank}", trainer.watch.remote())

    async def record_processes(self) -> None:
        """Write the ids of all processes into the run folder."""
        ids = {
            "driver": os.getpid(),
            "coordinator": await self.coordinator.pid.remote(),
            "trainers": [await trainer.pid.remote() for trainer in self.trainers],
            "engines": [await engine.pids() for engine in self.engines],
            "routers": self.routers.pids,
            "producers": [await producer.pid.remote() for producer in self.producers],
            "ray_folder": str(self._cluster.temporary),
        }
        write_atomically(self._folder.processes, json.dumps(ids, indent=1).encode())

    async def guarded(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Await `work`, or fail as soon as a watched process ends.

        Raises:
            RunFailedError: a process ended; the message names it and shows its last log lines.
        """
        task = asyncio.create_task(work)
        try:
            await asyncio.wait([task, *self._watchers], return_when=asyncio.FIRST_COMPLETED)
            if self._watchers and task.done() and task.exception() is not None:
                # The work may fail of a process that is just ending; its end then tells more.
                await asyncio.wait(self._watchers, timeout=DEATH_S, return_when=asyncio.FIRST_COMPLETED)
            for watcher, name in self._watchers.items():
                if watcher.done():
                    raise self._ended(name, watcher)
            return await task
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def wait_for_groups(self, count: int, timeout_s: float) -> list[AcceptedGroup] | None:
        content = await self._coordinator_call(self.coordinator.wait_for_groups.remote(count, timeout_s))
        return None if content is None else decode(content, list[AcceptedGroup])

    async def record_plan(self, plan: BatchPlan, content: bytes) -> None:
        await self._coordinator_call(self.coordinator.record_plan.remote(plan.batch_id, plan.positions, content))

    async def probe_engines(self, addresses: list[str]) -> list[list[ProbeSequence]]:
        """A few sequences of each of these engines; see `pipeline.parity_probe`."""
        probed = await answer(self.producers[0].probe.remote(addresses), "producer 0")
        return decode(probed, list[list[ProbeSequence]])

    async def score_probe(self, sequences: Sequence[ProbeSequence], start_weights: bool) -> dict[str, list[float]]:
        """The trainer's scores of them."""
        content = encode(sequences)
        scores = await self.on_trainers(lambda trainer: trainer.probe.remote(content, start_weights))
        return decode(scores[0], dict[str, list[float]])

    async def training_completed(self, plan: BatchPlan) -> None:
        await self._coordinator_call(
            self.coordinator.training_completed.remote(plan.rollout_id, plan.policy_version, plan.positions)
        )

    async def train(self, content: bytes) -> list[TrainReport]:
        reports = await self.on_trainers(lambda trainer: trainer.train.remote(content))
        return [decode(report, TrainReport) for report in reports]

    async def release_trainers(self) -> None:
        """End the ranks' processes, and with them all that they hold; nobody misses them until the next start."""
        ending = [task for task, name in self._watchers.items() if name.startswith("trainer_")]
        for task in ending:
            del self._watchers[task]
        closing = [
            asyncio.create_task(_stopped(trainer.close.remote(), f"trainer rank {rank}"))
            for rank, trainer in enumerate(self.trainers)
        ]
        await asyncio.wait(closing, timeout=STOP_TIMEOUT_S)
        for trainer in self.trainers:
            self._cluster.end(trainer)
        self.trainers = []
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.gather(*ending, return_exceptions=True)
        except TimeoutError:
            logger.warning("trainer ranks have not ended %.0f s after they were told to", STOP_TIMEOUT_S)

    async def rest_trainers(self) -> None:
        """Let the ranks leave their devices' memory until they are needed again."""
        await self.on_trainers(lambda trainer: trainer.rest.remote())

    async def identity(self) -> Identity:
        return decode(await self._coordinator_call(self.coordinator.identity.remote()), Identity)

    async def counts(self) -> QueueCounts:
        return decode(await self._coordinator_call(self.coordinator.counts.remote()), QueueCounts)

    async def save_prompt_source(self, rollout_id: int) -> None:
        """Have a data source of the user's own save its place, as part of a commit."""
        await self._coordinator_call(self.coordinator.save_prompt_source.remote(rollout_id))

    async def queue_state(self) -> QueueState:
        return decode(await self._coordinator_call(self.coordinator.queue_state.remote()), QueueState)

    async def rotate_queue(self, committed: QueueState, released: PositionRanges) -> None:
        """Tell the queue that a commit with this state is on disk, and which positions no kept commit needs."""
        await self._coordinator_call(self.coordinator.rotate.remote(encode(committed), released.ranges()))

    async def keep_version(self, policy_version: int) -> None:
        """Tell the queue that the next batch is planned under this version, too."""
        await self._coordinator_call(self.coordinator.keep_version.remote(policy_version))

    async def highest_version(self) -> int:
        version: int = await self._coordinator_call(self.coordinator.highest_version.remote())
        return version

    async def stats(self) -> list[ProducerStats]:
        contents = await self._on_producers(lambda producer: producer.stats.remote())
        return [decode(content, ProducerStats) for content in contents]

    async def evaluate(self, step: int, branch: str) -> EvaluationRecord:
        """The first producer evaluates the policy that serves; see `Evaluator`."""
        evaluated = await answer(self.producers[0].evaluate.remote(step, branch), "producer 0")
        return decode(evaluated, EvaluationRecord)

    async def evaluation_generated(self, step: int) -> None:
        """Returns when every response of an evaluation is there."""
        await answer(self.producers[0].evaluation_generated.remote(step), "producer 0")

    async def on_trainers(self, call: Callable[[Any], Awaitable[Any]]) -> list[Any]:
        """The same call on every rank, at once."""
        return list(
            await asyncio.gather(
                *(answer(call(trainer), f"trainer rank {rank}") for rank, trainer in enumerate(self.trainers))
            )
        )

    # The producers' side of a publication.

    async def pause_admission(self) -> None:
        await self._on_producers(lambda producer: producer.pause_admission.remote())

    async def resume_admission(self, policy_version: int, serving: list[str]) -> None:
        await self._serve_only(self._models[0], serving)
        await self._on_producers(lambda producer: producer.resume_admission.remote(policy_version, serving))

    async def serve_only(self, serving: list[str]) -> None:
        await self._serve_only(self._models[0], serving)
        await self._on_producers(lambda producer: producer.serve_only.remote(serving))

    # The trainer's side of a publication.

    async def open_sender(self, engine_names: list[str], timeout_s: float) -> list[dict[str, object]]:
        joining: list[dict[str, object]] = await self._on_first(
            lambda trainer: trainer.open_sender.remote(engine_names, timeout_s)
        )
        return joining

    async def connect_sender(self) -> None:
        await self._on_first(lambda trainer: trainer.connect_sender.remote())

    async def send_weights(self) -> int:
        sent: list[int] = await self.on_trainers(lambda trainer: trainer.send_weights.remote())
        return sent[0]

    async def highest_version_on_disk(self) -> int:
        version: int = await self._on_first(lambda trainer: trainer.highest_version_on_disk.remote())
        return version

    async def write_version(self, version: int, *, full: bool) -> PublishedVersion:
        told = await self.on_trainers(lambda trainer: trainer.write_version.remote(version, full))
        return decode(told[0], PublishedVersion)

    async def run_post_write_hook(self, folder: str, engine_names: list[str]) -> None:
        await self.on_trainers(lambda trainer: trainer.run_post_write_hook.remote(folder, engine_names))

    async def remove_version(self, version: int) -> None:
        await self._on_first(lambda trainer: trainer.remove_version.remote(version))

    async def share_next_part(self, version: int) -> dict[str, object] | None:
        if self._following is None:
            self._following = asyncio.gather(
                *(answer(t.follow_sharing.remote(), "a trainer rank") for t in self.trainers[1:])
            )
        part: dict[str, object] | None = await self._on_first(lambda trainer: trainer.share_next_part.remote(version))
        if part is None:
            await self._stop_following()
        return part

    async def stop_sharing(self) -> None:
        await self._on_first(lambda trainer: trainer.stop_sharing.remote())
        await self._stop_following()

    async def stop_producers(self) -> VimeError | None:
        """Finished groups are published, unfinished ones go back; the queue is at rest when this returns.

        Returns what a producer failed with: what was trained can be committed all the same.
        """
        runs = [task for task, name in self._watchers.items() if name.startswith("producer")]
        await self._on_producers(lambda producer: producer.stop.remote())
        if runs:
            await asyncio.wait(runs, timeout=STOP_TIMEOUT_S)
        failed = None
        for task in runs:
            name = self._watchers.pop(task)
            if task.done() and task.exception() is not None:
                failed = self._ended(name, task)
        return failed

    async def stop(self) -> None:
        """Stop what runs; what fails to stop is named in a warning and ended with Ray."""
        for task in [*self._watchers, *self._followers]:
            task.cancel()
        await asyncio.gather(*self._watchers, *self._followers, return_exceptions=True)
        stopping = {engine.name: engine.actor.stop.remote() for engine in self.engines}
        stopping |= {f"trainer rank {rank}": trainer.close.remote() for rank, trainer in enumerate(self.trainers)}
        if self.coordinator is not None:
            stopping["the queue coordinator"] = self.coordinator.close.remote()
        tasks = [asyncio.create_task(_stopped(reference, name)) for name, reference in stopping.items()]
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_TIMEOUT_S)
        await self.routers.stop()

    async def _serve_only(self, model: str, serving: Collection[str]) -> None:
        await self.routers.set(model, self._addresses[model], serving)

    def _engine(self, number: int, spec: EngineSpec, num_ranks: int) -> EngineProcess:
        log = self._folder.log(f"engine_{number}")
        what = encode((spec, self._cluster.engine_places(number)))
        return EngineProcess(
            f"engine {number}",
            spec.model,
            partial(self._cluster.spawn_worker, EngineActor, num_ranks + number, self._encoded, number, what),
            lambda actor: self._cluster.end(actor),
            cleanup_timeout_s=self.settings.engine.rollout_cleanup_timeout,
            log_tail=lambda: last_lines(log),
            on_restart=self.record_processes,
        )

    async def _follow_suspicions(self, producer: Any, keeper: EngineKeeper) -> None:
        """Have engines checked that fail a producer's requests. Ends with the producer, whose end is told elsewhere."""
        with suppress(RunFailedError):
            while True:
                for address in await answer(producer.suspects.remote(), "a producer"):
                    keeper.suspect(address)

    def _spawn_trainers(self) -> list[Any]:
        environment = {name: str(value) for name, value in self.settings.trainer.train_env_vars.items()}
        return [
            self._cluster.spawn_worker(TrainerActor, rank, self._encoded, rank, env=environment)
            for rank in range(self.settings.cluster.num_trainer_ranks)
        ]

    async def _stop_following(self) -> None:
        following, self._following = self._following, None
        if following is not None:
            await following

    async def _on_first(self, call: Callable[[Any], Awaitable[Any]]) -> Any:
        return await answer(call(self.trainers[0]), "trainer rank 0")

    async def _coordinator_call(self, reference: Awaitable[_Result]) -> _Result:
        return await answer(reference, "the queue coordinator")

    async def _on_producers(self, call: Callable[[Any], Awaitable[Any]]) -> list[Any]:
        return list(
            await asyncio.gather(
                *(answer(call(producer), f"producer {number}") for number, producer in enumerate(self.producers))
            )
        )

    def _watch(self, name: str, reference: Awaitable[Any]) -> None:
        async def watch() -> Any:
            return await answer(reference, name)

        self._watchers[asyncio.create_task(watch())] = name

    def _ended(self, name: str, watcher: asyncio.Task[Any]) -> VimeError:
        error = watcher.exception() if not watcher.cancelled() else None
        if isinstance(error, VimeError) and not isinstance(error, RunFailedError):
            return error
        how = f"exit status {watcher.result()}" if error is None else _without_next_step(error)
        lines = last_lines(self._folder.log(name))
        shown = "".join(f"\n  | {line}" for line in lines)
        return RunFailedError(
            f"{name} ended unexpectedly ({how}).\nLast lines of {self._folder.log(name)}:{shown}\n",
            next_step="Run the same command again; it resumes from the newest commit.",
        )


def _without_next_step(error: BaseException) -> str:
    return error.message if isinstance(error, VimeError) else str(error)


async def _stopped(reference: Awaitable[Any], name: str) -> None:
    """Wait for a stop call; a process that is gone already has stopped."""
    try:
        await answer(reference, name)
    except RunFailedError:
        return
    except VimeError as error:
        logger.warning("%s did not close in order: %s", name, error)


def _health(settings: Settings) -> HealthSettings:
    engine = settings.engine
    return HealthSettings(
        interval_s=engine.rollout_health_check_interval,
        timeout_s=engine.rollout_health_check_timeout,
        first_wait_s=engine.rollout_health_check_first_wait,
    )
