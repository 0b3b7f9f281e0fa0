"""The engines of a run as one: started or found, taken over, and kept, each behind the router of its model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import Any

from pipeline.actors.engine import EngineActor
from pipeline.actors.settings import encode_settings
from pipeline.cluster import Cluster
from pipeline.engine_health import EngineKeeper, Fences, HealthSettings, KeptEngine
from pipeline.engine_process import EngineProcess
from pipeline.external_engines import ExternalEngine, check_external
from pipeline.frozen_engines import FencesOfModels, FrozenEngines
from pipeline.messages import encode
from pipeline.node_moves import NodeMoves
from pipeline.process_watch import ProcessWatch
from pipeline.prometheus.exporter import write_engine_targets
from pipeline.routers import Routers
from pipeline.run_folder import RunFolder
from pipeline.sample_columns import sample_columns
from vime.backends.vllm_utils.startup_log import last_lines
from vime.counted import counted
from vime.settings.groups import Settings
from vime.settings.groups.router import ModelRouter
from vime.settings.rules.quantities import engines_are_others, own_engines
from vime.settings.served_models import EngineSpec, model_names

PROGRESS_S = 2.0


def _as_it_is(engine: KeptEngine) -> KeptEngine:
    return engine


class EngineGroup:
    """Processes and addresses of the engines of each model; the addresses are true also after one has moved."""

    def __init__(
        self,
        settings: Settings,
        folder: RunFolder,
        cluster: Cluster,
        watch: ProcessWatch,
        moves: NodeMoves,
        note: Callable[[str], None],
        on_restart: Callable[[], Awaitable[None]],
    ) -> None:
        """`note` is told of engines that fail and are replaced; `on_restart` is called after each restart."""
        self._settings, self._folder, self._cluster, self._watch = settings, folder, cluster, watch
        self._moves, self._note, self._on_restart = moves, note, on_restart
        self._encoded = encode_settings(settings)
        self.processes = [
            self._process(number, spec)
            for number, spec in enumerate(own_engines(settings))
            if spec.kind != "placeholder"
        ]
        """Those that vime has started."""
        self.routers = Routers(settings, folder, note, on_restart)
        self._models = model_names(settings)
        self._addresses: dict[str, list[str]] = {name: [] for name in self._models}
        """Served model, the trained one first -> base URLs of its engines."""
        self.keeper: EngineKeeper | None = None
        """Who replaces engines, in a run that does, once they have started."""

    async def start(
        self, report: Callable[[str], None], kept: Callable[[KeptEngine], KeptEngine] = _as_it_is
    ) -> list[str]:
        """Start all engines; base URLs of those that are trained. `report` is told what they are at.

        `kept` is how the keeper sees an engine. Those of other models serve at once, through their routers.
        """
        starting = asyncio.gather(*(engine.start() for engine in self.processes))
        try:
            while not (await asyncio.wait([starting], timeout=PROGRESS_S))[0]:
                phases = [await engine.progress() for engine in self.processes]
                report("; ".join(f"engine {number}: {phase}" for number, phase in enumerate(phases)))
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        starting.result()
        if engines_are_others(self._settings):
            return await self._join(report)
        if self._settings.engine.use_fault_tolerance and self.processes:
            self.keeper = EngineKeeper([kept(engine) for engine in self.processes], _health(self._settings), self._note)
        else:
            for number, engine in enumerate(self.processes):
                self._watch.add(f"engine_{number}", engine.actor.watch.remote())
        self._addresses = {
            name: [engine.address for engine in self.processes if engine.model == name] for name in self._models
        }
        for name in self._models[1:]:
            await self.routers.set(name, self._addresses[name], self._addresses[name])
        return self.trained

    async def take_over(self) -> int | None:
        """Take over engines that outlived a driver before; the highest version that one of them holds.

        They serve nothing until they confirm a version, as new ones. Those that can't be used are ended. None without
        one that was taken over.
        """
        kept = [engine for engine in self.processes if engine.is_kept]
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
    def trained(self) -> list[str]:
        """Base URLs of the engines that are trained, once all have started."""
        return self._addresses[self.trained_model]

    @property
    def frozen(self) -> list[str]:
        """Base URLs of the engines that aren't trained, once all have started."""
        return [address for name in self._models[1:] for address in self._addresses[name]]

    @property
    def taken_over(self) -> set[str]:
        """Base URLs of the engines that were taken over, once all have started."""
        return {engine.address for engine in self.processes if engine.is_taken_over}

    @property
    def exist(self) -> bool:
        """Whether samples come from engines, once all have started."""
        return any(self._addresses.values())

    async def start_routers(self) -> tuple[ModelRouter, ...]:
        """Start a router for each model; an engine is its worker when it has confirmed a version. None without engines.

        The end of a router that isn't replaced is the end of the run.
        """
        if not self.processes and not engines_are_others(self._settings):
            return ()
        await self.routers.start(self._models, self._cluster.host)
        for router in self.routers.of_models:
            of_model = f" of {router.model}" if len(self._models) > 1 else ""
            self._note(f"Router{of_model}: http://{router.host}:{router.port}")
        self._watch.add("router", self.routers.keep())
        return self.routers.of_models

    def keep(
        self,
        fences: Fences,
        frozen_anew: Callable[[str, str], Awaitable[None]],
        tell_frozen: Callable[[str, Mapping[str, str]], None],
        on_move: Callable[[str, str], Awaitable[None]],
    ) -> None:
        """From now on engines that fail are fenced and replaced, where the settings ask for it.

        Of the models that aren't trained, `frozen_anew` is told where an engine was and is, before it gets requests
        again, and `tell_frozen` which engines of a model get none, and why. `on_move` is told of another address.
        """
        if self.keeper is None:
            return
        by_address: dict[str, Fences] = {}
        for name in self._models[1:]:
            frozen = FrozenEngines(
                self._addresses[name], partial(self._serve_only, name), frozen_anew, partial(tell_frozen, name)
            )
            by_address |= dict.fromkeys(self._addresses[name], frozen)
        self._watch.add("engines", self.keeper.run(FencesOfModels(fences, by_address, on_move)))

    def write_targets(self) -> None:
        """Tell Prometheus where the engines of all models are, once they have started."""
        named = {engine.name.replace(" ", "_"): engine.address for engine in self.processes}
        of_others = {f"engine_{number}": address for number, address in enumerate(self.trained)}
        write_engine_targets(self._settings.logging, self._folder, named or of_others)

    async def serve_only(self, serving: Collection[str]) -> None:
        """The router of the trained model sends requests to these of its engines alone."""
        await self._serve_only(self.trained_model, serving)

    def moved(self, address: str, now_at: str) -> None:
        """An engine is at another address from now on."""
        for addresses in self._addresses.values():
            addresses[:] = [now_at if each == address else each for each in addresses]
        self.write_targets()

    async def _join(self, report: Callable[[str], None]) -> list[str]:
        """Base URLs of engines that others started, checked; they get no requests before they confirm a version."""
        given, trained = self._settings.engine.rollout_external_engine_addrs, self.trained_model
        if given is not None:
            addresses = [f"http://{address}" for address in given]
        else:
            addresses = await self.routers.registered(trained, report)
        self._addresses[trained] = addresses
        await self.serve_only([])
        await check_external(addresses, sample_columns(self._settings))
        if self._settings.engine.use_fault_tolerance:
            engines = [ExternalEngine(number, address) for number, address in enumerate(addresses)]
            self.keeper = EngineKeeper(engines, _health(self._settings), self._note)
        return addresses

    async def _serve_only(self, model: str, serving: Collection[str]) -> None:
        await self.routers.set(model, self._addresses[model], serving)

    def _process(self, number: int, spec: EngineSpec) -> EngineProcess:
        log = self._folder.log(f"engine_{number}")

        def spawn() -> Any:
            what = encode((spec, self._cluster.engine_places(number)))
            return self._cluster.spawn_worker(
                EngineActor, self._settings.cluster.num_trainer_ranks + number, self._encoded, number, what
            )

        return EngineProcess(
            f"engine {number}",
            spec.model,
            spawn,
            lambda actor: self._cluster.end(actor),
            cleanup_timeout_s=self._settings.engine.rollout_cleanup_timeout,
            log_tail=lambda: last_lines(log),
            on_restart=self._on_restart,
            node=lambda: self._cluster.engine_places(number)[0].node_id,
            leave_lost_node=partial(self._moves.leave_lost_nodes, number),
            is_kept=self._settings.queue.rollout_session_id is not None
            and len(self._cluster.engine_places(number)) == 1,
        )


def _health(settings: Settings) -> HealthSettings:
    engine = settings.engine
    return HealthSettings(
        interval_s=engine.rollout_health_check_interval,
        timeout_s=engine.rollout_health_check_timeout,
        first_wait_s=engine.rollout_health_check_first_wait,
    )
