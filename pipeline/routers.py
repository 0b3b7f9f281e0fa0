"""The run's routers as the driver sees them: one for each model, started here or by others."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from pipeline.external_engines import registered_engines
from pipeline.prometheus.exporter import write_router_target
from pipeline.restarts import RestartBudget
from pipeline.run_folder import RunFolder
from storage.files import write_atomically
from vime.backends.vllm_utils.router_arguments import router_options_of
from vime.backends.vllm_utils.router_server import RouterLaunch, RouterServer, RouterWorkers, is_installed
from vime.errors import EngineError, EngineStartError, RunFailedError
from vime.settings.groups import ModelRouter, Settings

logger = logging.getLogger(__name__)

_POLL_S = 0.25
DEATH_S = 2 * _POLL_S
"""How long the end of a router may become known after a call to it has failed."""
PORT_S = 15.0
"""How long the processes of a router that ended may keep its port."""


@dataclass(frozen=True)
class _Running:
    router: ModelRouter
    workers: RouterWorkers
    server: RouterServer | None
    """None for a router that others started."""

    @property
    def has_ended(self) -> bool:
        return self.server is not None and self.server.poll() is not None


class Routers:
    """Started together; `stop` ends those that were started here, and takes the run's engines out of the others."""

    def __init__(
        self,
        settings: Settings,
        folder: RunFolder,
        note: Callable[[str], None],
        on_restart: Callable[[], Awaitable[None]],
    ) -> None:
        """`note` is told what a user should know, `on_restart` is called when a router was replaced."""
        self._on_restart, self._host = on_restart, ""
        self._settings, self._folder, self._note = settings, folder, note
        self._running: dict[str, _Running] = {}
        self._engines: dict[str, tuple[str, ...]] = {}
        """Model -> addresses of its engines, which may be registered with its router."""
        self._serving: dict[str, tuple[str, ...]] = {}
        """Model -> those of them that are to be."""
        self._discovered: set[str] = set()
        """Models whose engines are those that others registered."""
        self._changing = asyncio.Lock()

    @property
    def of_models(self) -> tuple[ModelRouter, ...]:
        return tuple(running.router for running in self._running.values())

    @property
    def pids(self) -> list[int]:
        """Supervisors of the routers that were started here."""
        return [running.server.pid for running in self._running.values() if running.server is not None]

    async def start(self, models: Sequence[str], host: str) -> None:
        """Start a router for each model at `host`, or use that of the settings for the first one.

        Raises `EngineStartError` when one doesn't come up. Without vllm-router there are none, and a note says so.
        """
        given = self._settings.router
        if given.vllm_router_ip is not None:
            assert given.vllm_router_port is not None
            self._add(ModelRouter(models[0], given.vllm_router_ip, given.vllm_router_port), None)
            models = models[1:]
        if models and not is_installed():
            self._note("vllm-router is not installed: requests go straight to the engines, and agents have no address.")
            return
        self._host = host
        for name in models:
            port = 0 if self._running else given.vllm_router_port or 0
            server = await asyncio.to_thread(self._start_first, name, port)
            self._add(ModelRouter(name, *server.address), server)
        if self._settings.queue.rollout_session_id is not None:
            ports = {name: running.router.port for name, running in self._running.items() if running.server is not None}
            self._folder.router_ports.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._folder.router_ports, msgspec.json.encode(ports))

    async def set(self, model: str, engines: Collection[str], serving: Collection[str]) -> None:
        """Have exactly `serving` registered of a model's `engines`; one that can't be registered is told, and left out.

        Raises:
            EngineError: the router doesn't answer.
        """
        if model not in self._running:
            return
        async with self._changing:
            self._engines[model], self._serving[model] = tuple(engines), tuple(serving)
            try:
                await self._register(model)
            except EngineError:
                await asyncio.sleep(DEATH_S)
                if not self._running[model].has_ended:
                    raise
                # Its successor gets them registered.

    async def registered(self, model: str, report: Callable[[str], None]) -> list[str]:
        """Engines that others have registered with a model's router; later ones are taken out of it again.

        Raises:
            EngineStartError: none was registered in time, or there is no router.
        """
        if model not in self._running:
            raise EngineStartError(
                "--rollout-num-gpus 0 needs a router with which engines are registered, and there is none.",
                next_step="Install vllm-router, or give --vllm-router-ip and --vllm-router-port.",
            )
        running = self._running[model]
        self._discovered.add(model)
        where = f"{running.router.host}:{running.router.port}"
        return await registered_engines(running.workers.addresses, where, report)

    async def keep(self) -> None:
        """Replace routers that were started here when they end.

        Raises:
            RunFailedError: one has ended too often, or none can be started in its place.
        """
        budgets = {model: RestartBudget(self._settings.queue.max_process_restarts) for model in self._running}
        while True:
            for model, running in self._running.items():
                if running.has_ended:
                    await self._replace(model, budgets[model])
            await asyncio.sleep(_POLL_S)

    async def _replace(self, model: str, budget: RestartBudget) -> None:
        """Start another router at the same address, and register those engines with it that serve."""
        old = self._running[model]
        why = f"the router of {model} ended with status {None if old.server is None else old.server.poll()}"
        which = budget.take()
        if which is None:
            raise RunFailedError(f"{why}, after {budget.limit} restarts in an hour")
        self._note(f"{why[0].upper()}{why[1:]} and is replaced, {which}.")
        async with self._changing:
            try:
                server = await asyncio.to_thread(self._start, model, old.router.port, port_timeout_s=PORT_S)
                self._running[model] = dataclasses.replace(old, server=server)
                await self._register(model)
            except EngineError as error:
                raise RunFailedError(f"{why}; its successor failed: {error.message}") from error
        await self._on_restart()

    def _start_first(self, model: str, port: int) -> RouterServer:
        """At the port of the router that a session with kept engines had, where it is free and none is asked for."""
        before = 0 if port else self._port_before(model)
        if before:
            try:
                return self._start(model, before, port_timeout_s=PORT_S)
            except EngineStartError as error:
                self._note(f"The router of {model} gets another address than before: {error.message.splitlines()[0]}")
        return self._start(model, port)

    def _port_before(self, model: str) -> int:
        """0 where there was none."""
        if self._settings.queue.rollout_session_id is None or not self._folder.router_ports.exists():
            return 0
        with suppress(msgspec.MsgspecError):
            return msgspec.json.decode(self._folder.router_ports.read_bytes(), type=dict[str, int]).get(model, 0)
        return 0

    def _start(self, model: str, port: int, *, port_timeout_s: float = 0.0) -> RouterServer:
        options = router_options_of(self._settings.router_args)
        metrics_host = self._settings.logging.prometheus_host
        launch = RouterLaunch(self._host, port, self._folder.log(f"router_{model}"), options, metrics_host)
        server = RouterServer(launch, port_timeout_s=port_timeout_s)
        write_router_target(self._settings.logging, self._folder, model, server.metrics_address)
        return server

    async def _register(self, model: str) -> None:
        """Have exactly those of a model's engines registered that serve. Raises `EngineError`."""
        engines, workers = self._engines.get(model, ()), self._running[model].workers
        out_of = list(engines)
        if model in self._discovered:
            late = sorted(set(await workers.addresses()) - set(engines))
            for address in late:
                self._note(f"Engine {address} was registered after the run began, without its weights: taken out.")
            out_of += late
        for address in await workers.set(self._serving.get(model, ()), out_of):
            self._note(f"Engine {address} could not be registered with the router of {model}.")

    async def stop(self) -> None:
        """End what was started here; others' routers forget the run's engines, as far as they answer."""
        for name, running in self._running.items():
            if running.server is not None:
                await asyncio.to_thread(running.server.stop)
            else:
                try:
                    await self.set(name, self._engines.get(name, ()), ())
                except EngineError as error:
                    logger.warning("engines stay registered with the router of %s: %s", name, error)
            await running.workers.close()

    def _add(self, router: ModelRouter, server: RouterServer | None) -> None:
        self._running[router.model] = _Running(router, RouterWorkers(router.host, router.port), server)
