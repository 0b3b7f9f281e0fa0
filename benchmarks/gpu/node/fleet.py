"""Several engines that can be killed and come back: vLLM on GPUs, stand-ins where a few cores would carry them all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import psutil

from benchmarks.chaos.processes import kill_all
from benchmarks.gpu.engines import engine_launch, only_visible, started_on
from tests.support.standin_engine import StandinEngine
from vime.backends.vllm_utils.server import EngineServer

MAX_MODEL_LEN = 1024
PORT_S = 30.0
"""How long the processes of an engine that was killed may keep its port."""


class Fleet(Protocol):
    """Engines, counted from 0."""

    @property
    def addresses(self) -> Sequence[str]:
        """Base URLs."""
        ...

    def kill(self, number: int) -> None:
        """End an engine in the middle of what it does."""
        ...

    def restart(self, number: int) -> None:
        """Have it answer again at its address, with the weights that it was started with."""
        ...


class StandinFleet:
    """Stand-ins in this process."""

    def __init__(self, engines: Sequence[StandinEngine]) -> None:
        self._engines = list(engines)

    @property
    def addresses(self) -> list[str]:
        return [engine.address for engine in self._engines]

    def kill(self, number: int) -> None:
        self._engines[number].die()

    def restart(self, number: int) -> None:
        self._engines[number].start_anew()


class ServerFleet:
    """vLLM servers, each on GPUs of its own."""

    def __init__(self, servers: Sequence[EngineServer], gpus: int, places: Sequence[Sequence[int]]) -> None:
        self._servers, self._gpus, self._places = list(servers), gpus, places

    @property
    def addresses(self) -> list[str]:
        return [server.address for server in self._servers]

    def kill(self, number: int) -> None:
        supervisor = psutil.Process(self._servers[number].pid)
        kill_all([*supervisor.children(recursive=True), supervisor])

    def restart(self, number: int) -> None:
        server = self._servers[number]
        with only_visible(self._gpus, self._places[number]):
            server.start(port_timeout_s=PORT_S)
        server.wait_ready()


@contextmanager
def running_fleet(model: Path, num_engines: int, tensor_size: int, gpus: int, first_gpu: int) -> Iterator[Fleet]:
    """Engines that are ready, of so many workers each, on the GPUs from `first_gpu` on; without GPUs stand-ins."""
    with ExitStack() as stack:
        if not gpus:
            engines = [StandinEngine(num_workers=tensor_size) for _ in range(num_engines)]
            yield StandinFleet([stack.enter_context(engine) for engine in engines])
            return
        firsts = range(first_gpu, first_gpu + num_engines * tensor_size, tensor_size)
        places = [range(first, first + tensor_size) for first in firsts]
        servers = []
        for number, place in enumerate(places):
            launch = engine_launch(model, gpus, max_model_len=MAX_MODEL_LEN, name=f"engine_{number}")
            launch = dataclasses.replace(launch, tensor_size=tensor_size, num_workers=tensor_size)
            servers.append(stack.enter_context(started_on(launch, gpus, place)))
        for server in servers:
            server.wait_ready()
        yield ServerFleet(servers, gpus, places)
