"""A fleet of engines behind a router as a run has it: groups of requests, publications, engines that are lost."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from benchmarks.gpu.node.fleet import Fleet
from benchmarks.gpu.node.sharded import ShardedTrainer
from benchmarks.gpu.publication import TIMEOUT_S
from benchmarks.gpu.traffic import Traffic
from benchmarks.publish import Admission
from pipeline.publication import Publication
from pipeline.publisher import WeightPublisher
from pipeline.routers import Routers
from pipeline.run_folder import RunFolder
from pipeline.serving_engines import ServingEngines
from pipeline.weight_transports.group import GroupTransport
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.protocol import GenerateRequest, GenerateResult, Sampling
from vime.backends.vllm_utils.routed import RoutedClient
from vime.backends.vllm_utils.updates import Update
from vime.errors import GenerationAborted, PublicationError
from vime.settings.parse import parse_settings

MODEL = "default"
COUNT_S = 10.0
"""How long an engine may take to count a request that it has answered."""
IDLE_S = 60.0
"""How long engines may take to end what they are at."""
AGAIN_S = 0.1
MOST_PUBLICATIONS = 4
"""After the kill of an engine."""
_SERVED = re.compile(r"^vllm:request_success_total(?:\{[^}]*\})? ([\d.e+]+)$", re.MULTILINE)
_PROMPT = [3, 4, 5]


class KillableClient(EngineClient):
    """Has its engine killed at the moment in which it is to load weights, once."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.kill: Callable[[], None] | None = None

    async def update_weights(self, update: Update) -> None:
        kill, self.kill = self.kill, None
        if kill is not None:
            await asyncio.to_thread(kill)
        await super().update_weights(update)


class RoutedAdmission(Admission):
    """Has the router and whoever asks it know which engines serve."""

    def __init__(self, routers: Routers, engines: ServingEngines, addresses: Sequence[str]) -> None:
        super().__init__()
        self._routers, self._engines, self._addresses = routers, engines, list(addresses)

    async def resume_admission(self, policy_version: int, serving: list[str]) -> None:
        await self.serve_only(serving)
        await super().resume_admission(policy_version, serving)

    async def serve_only(self, serving: Collection[str]) -> None:
        await self._routers.set(MODEL, self._addresses, serving)
        self._engines.serve(serving)


class Groups:
    """What asks the router in the place of one engine: each request is a group, which is asked again when aborted."""

    def __init__(self, engines: ServingEngines, address: str) -> None:
        self._engines, self.address = engines, address
        self._numbers = itertools.count()
        self._running: set[asyncio.Future[None]] = set()
        self.num_aborted = 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        group, ended = next(self._numbers), asyncio.get_running_loop().create_future()
        self._running.add(ended)
        try:
            while True:
                try:
                    return await self.of(group, request)
                except GenerationAborted:
                    self.num_aborted += 1
                    await asyncio.sleep(AGAIN_S)
        finally:
            self._running.discard(ended)
            ended.set_result(None)

    async def all_end(self) -> None:
        """Until the requests that run now have ended."""
        async with asyncio.timeout(IDLE_S):
            await asyncio.gather(*self._running)

    async def of(self, group: int, request: GenerateRequest) -> GenerateResult:
        """A group's request. Raises `GenerationAborted` when its engine is lost."""
        sampler = self._engines.of_group(group)
        if sampler is None:
            raise GenerationAborted("there are no engines")
        return await self._engines.request(sampler, sampler.generate(request))


class RoutedFleet:
    """Engines, router, publisher and trainer of one stage."""

    def __init__(
        self, fleet: Fleet, trainer: ShardedTrainer, routers: Routers, clients: Sequence[KillableClient], gpus: int
    ) -> None:
        self.fleet, self.trainer, self.clients = fleet, trainer, list(clients)
        self.addresses = list(fleet.addresses)
        (router,) = routers.of_models
        self._router = RoutedClient(f"http://{router.host}:{router.port}")
        self._session = aiohttp.ClientSession()
        engines = ServingEngines(self.clients, router=self._router, run_id="node", are_replaced=True)
        self.groups = Groups(engines, self._router.address)
        self.admission = RoutedAdmission(routers, engines, self.addresses)
        self.publisher = WeightPublisher(
            self.clients,
            GroupTransport(trainer, streams=False, streams_after_failure=gpus > 0, timeout_s=TIMEOUT_S),
            self.admission,
            start_version=0,
            flush_interval=0,
            timeout_s=TIMEOUT_S,
        )

    async def close(self) -> None:
        await self._router.close()
        await self._session.close()

    def traffic(self, num_lanes: int, num_tokens: int) -> Traffic:
        """Requests through the router, as many at once as there are lanes; use it with `async with`."""
        return Traffic(self.groups, self.admission, num_lanes, num_tokens)

    async def publish(self) -> Publication:
        """Take a step, and publish what it has made."""
        await self.trainer.step()
        return await self.publisher.publish()

    async def published(self) -> Publication:
        """The same; raises `PublicationError` unless every engine has it."""
        publication = await self.publish()
        versions = [await client.weight_version() for client in self.clients]
        if not publication.raised or set(versions) != {publication.version}:
            raise PublicationError(
                f"Engines hold the versions {versions} after the publication of {publication.version}, expected: that "
                f"one alone. {publication.fenced}"
            )
        return publication

    async def kill_and_publish(self, victim: int) -> tuple[list[Publication], float]:
        """Kill an engine in a publication, and publish until the others serve a new version; what was published, and
        the seconds of all of it.

        Raises `PublicationError` when another engine than the victim is left behind after a few.
        """
        lost = self.addresses[victim]
        self.clients[victim].kill = lambda: self.fleet.kill(victim)
        others = [client for number, client in enumerate(self.clients) if number != victim]
        started, found = time.monotonic(), [await self.publish()]
        while len(found) < MOST_PUBLICATIONS and not (found[-1].raised and found[-1].fenced.keys() == {lost}):
            found.append(await self.publish())
        seconds = time.monotonic() - started
        versions = {await client.weight_version() for client in others}
        if versions != {found[-1].version} or found[-1].fenced.keys() != {lost}:
            raise PublicationError(f"Engines hold {versions} after the loss of one, fenced: {found[-1].fenced}.")
        return found, seconds

    async def return_s(self, victim: int) -> float:
        """Have a lost engine back as a run has it; seconds from its answering again to its serving again."""
        address = self.addresses[victim]
        await self.publisher.fence(address, "its process was killed")
        await asyncio.to_thread(self.fleet.restart, victim)
        started = time.monotonic()
        await self.publisher.readmit(address)
        publication = await self.publisher.catch_up()
        if publication.fenced or publication.returned != [address]:
            raise PublicationError(f"{address} has not come back: {publication}.")
        return time.monotonic() - started

    async def places(self, num_groups: int) -> list[str]:
        """Which engine the router chooses for each of the first groups; nothing else may be asked meanwhile."""
        await self._idle()
        return [await self._place(group) for group in range(num_groups)]

    async def _idle(self) -> None:
        """Until the engines have ended what nobody waits for any more."""
        async with asyncio.timeout(IDLE_S):
            for client in self.clients:
                while client.address not in self.publisher.fenced and (await client.metrics()).num_running:
                    await asyncio.sleep(AGAIN_S)

    async def _place(self, group: int) -> str:
        before = await self._served()
        await self.groups.of(group, GenerateRequest(f"place-{time.monotonic_ns()}", _PROMPT, Sampling(1)))
        async with asyncio.timeout(COUNT_S):
            while (after := await self._served()) == before:
                await asyncio.sleep(0.01)
        (place,) = [address for address in before if after[address] != before[address]]
        return place

    async def _served(self) -> dict[str, float]:
        """Requests that each engine has answered, of those that get any."""
        return {
            address: await self._count(address) for address in self.addresses if address not in self.publisher.fenced
        }

    async def _count(self, address: str) -> float:
        async with self._session.get(f"{address}/metrics") as answer:
            return sum(map(float, _SERVED.findall(await answer.text())))


@asynccontextmanager
async def behind_router(fleet: Fleet, trainer: ShardedTrainer, folder: Path, gpus: int) -> AsyncIterator[RoutedFleet]:
    """The fleet behind a router of its own, after a first publication."""
    settings = parse_settings(["--save", str(folder)])
    routers = Routers(settings, RunFolder.of(settings), print, lambda: asyncio.sleep(0))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(routers.stop)
        await routers.start([MODEL], "127.0.0.1")
        clients = [KillableClient(address) for address in fleet.addresses]
        for client in clients:
            stack.push_async_callback(client.close)
        routed = RoutedFleet(fleet, trainer, routers, clients, gpus)
        stack.push_async_callback(routed.close)
        await routed.published()
        yield routed
