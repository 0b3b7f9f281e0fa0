"""An inference engine's process, and the actors of its parts on further nodes."""

from __future__ import annotations

import asyncio
import os
import socket

from pipeline.actors.settings import decode_settings
from pipeline.engine_wiring import build_engine_server, engine_columns
from pipeline.messages import Takeover, decode, encode
from pipeline.node_devices import ProcessPlace, spawn_at
from pipeline.process_log import log_to_file
from pipeline.run_folder import RunFolder
from pipeline.takeover import USABLE_S, make_usable
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.engine_needs import check_engine
from vime.backends.vllm_utils.launch import EnginePart
from vime.backends.vllm_utils.server import EngineServer
from vime.errors import EngineError
from vime.settings.served_models import EngineSpec

PORT_MARGIN_S = 10.0
"""What a process that ends may keep its port beyond the time that it has to clean up."""


class EngineActor:
    """Holds one inference engine's subprocess, and the actors of those on further nodes."""

    def __init__(self, settings: bytes, number: int, engine: bytes) -> None:
        """`engine` is an `EngineSpec`, and the places of the engine's parts, one for each node.

        This process is at the first.
        """
        decoded = decode_settings(settings)
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
        self._progress, self._is_taken_over = "not started", False

    async def take_over(self) -> bytes:
        """Take over the engine that outlived a driver before, or end it; a `Takeover`.

        An engine that is taken over has no requests any more, and has sampled. Where a trainer shares the memory, it
        sleeps.
        """
        differences = await asyncio.to_thread(self._server.take_over)
        if differences is None:
            return encode(Takeover(None, ""))
        if differences:
            return encode(Takeover(None, "; ".join(differences)))
        try:
            version = await make_usable(self._server.address, self._needs, sleeps=self._sleeps)
        except (EngineError, TimeoutError) as error:
            await asyncio.to_thread(self._server.stop)
            return encode(Takeover(None, str(error) or f"it was not usable within {USABLE_S:g} s"))
        self._is_taken_over = True
        return encode(Takeover(version, ""))

    async def start(self, port: int = 0) -> str:
        """Start the engine, wait until it answers, and check that it can do what the run needs; its base URL.

        `port` is that of a process before it, which may take its time to end; 0 lets the system choose. One that was
        taken over runs already.
        """
        if self._is_taken_over and not port:
            return self._server.address
        self._is_taken_over = False
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
        decoded = decode_settings(settings)
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
