"""A process's `/metrics`, and the file by which Prometheus finds it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from logging import getLogger
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pipeline.prometheus.families import families
from pipeline.run_folder import RunFolder
from storage.files import make_folder, write_atomically
from vime.errors import StorageError
from vime.settings.groups.logging import LoggingSettings

logger = getLogger(__name__)

Read = Callable[[], Mapping[str, msgspec.Struct]]
"""Role -> newest record; called for each scrape, on a thread of the server."""
READ_TIMEOUT_S = 5.0


class Exporter:
    """Serves until it is closed. Use with `contextlib.closing` or close it."""

    def __init__(self, address: str, port: int, read: Read, target_file: Path, labels: Mapping[str, str]) -> None:
        """`port` 0 takes a free one. `target_file`: see `write_target`. Raises `OSError`."""
        registry = CollectorRegistry()
        registry.register(_Records(read))
        self._server, self._thread = start_http_server(port, address, registry)
        self.port: int = self._server.server_port
        self._target_file = target_file
        write_target(target_file, f"{reachable_host(address)}:{self.port}", labels)

    def close(self) -> None:
        self._target_file.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Records(Collector):
    def __init__(self, read: Read) -> None:
        self._read = read

    def describe(self) -> list[Metric]:
        """Nothing is known before the first record."""
        return []

    def collect(self) -> Iterator[Metric]:
        for role, record in self._read().items():
            yield from families(role, record)


def write_target(path: Path, target: str, labels: Mapping[str, str]) -> None:
    """A file of Prometheus's `file_sd_configs`: one target and its labels. One that can't be written stops nothing."""
    try:
        make_folder(path.parent)
        write_atomically(path, msgspec.json.encode([{"targets": [target], "labels": dict(labels)}]))
    except StorageError as error:
        logger.warning("Prometheus does not find %s: %s", target, error)


def write_engine_targets(logging: LoggingSettings, folder: RunFolder, addresses: Mapping[str, str]) -> None:
    """With `--prometheus-port`, the addresses of the engines by name: their servers have a `/metrics` of their own."""
    if logging.prometheus_port is None:
        return
    for name, address in addresses.items():
        write_target(folder.prometheus_target(name), urlsplit(address).netloc, _labels(folder, "engine", name))


def write_router_target(logging: LoggingSettings, folder: RunFolder, model: str, address: tuple[str, int]) -> None:
    """With `--prometheus-port`, where vllm-router's own `/metrics` of a model listens."""
    if logging.prometheus_port is None:
        return
    host, port = address
    name = f"router_{model}"
    write_target(folder.prometheus_target(name), f"{reachable_host(host)}:{port}", _labels(folder, "router", name))


def clear_targets(folder: RunFolder) -> None:
    """Forget processes that have ended, however they did."""
    for path in folder.prometheus.glob("*.json"):
        path.unlink(missing_ok=True)


def reachable_host(address: str) -> str:
    """The name that others reach a server by that listens on `address`."""
    return socket.gethostname() if address in ("0.0.0.0", "::") else address


def start_exporter(
    logging: LoggingSettings, folder: RunFolder, role: str, read: Read, number: int | None = None
) -> tuple[Exporter | None, str]:
    """(the exporter, what went wrong). Without `--prometheus-port` there is neither.

    The run's own process takes that port, the others free ones. A port that is taken never stops a process.
    """
    port = logging.prometheus_port
    if port is None:
        return None, ""
    name = role if number is None else f"{role}_{number}"
    try:
        exporter = Exporter(
            logging.prometheus_host,
            port if role == "run" else 0,
            read,
            folder.prometheus_target(name),
            _labels(folder, role, name),
        )
    except OSError as error:
        words = f"--prometheus-port {port}: {name} has no /metrics: {error}"
        logger.warning(words)
        return None, words
    return exporter, ""


def _labels(folder: RunFolder, role: str, process: str) -> dict[str, str]:
    return {"job": "vime", "run": folder.root.name, "role": role, "process": process}


def on_loop(read: Callable[[], msgspec.Struct | None], role: str) -> Read:
    """Reads on the event loop of the caller, where what is read changes. A scrape fails while the loop is held up."""
    loop = asyncio.get_running_loop()

    async def call() -> msgspec.Struct | None:
        return read()

    def collect() -> Mapping[str, msgspec.Struct]:
        record = _result(loop, call())
        return {} if record is None else {role: record}

    return collect


def _result(loop: asyncio.AbstractEventLoop, call: Coroutine[Any, Any, msgspec.Struct | None]) -> msgspec.Struct | None:
    future = asyncio.run_coroutine_threadsafe(call, loop)
    try:
        return future.result(READ_TIMEOUT_S)
    except FutureTimeoutError:
        future.cancel()
        raise
