"""vllm-router as a supervised subprocess, and the workers that it knows."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import logging
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.backends.vllm_utils.engine_http import EngineHttp
from vime.backends.vllm_utils.listening import answers, claim_port
from vime.backends.vllm_utils.startup_log import last_lines
from vime.backends.vllm_utils.supervised import SupervisedProcess
from vime.errors import EngineError, EngineStartError
from vime.settings.owned_options import option_name

logger = logging.getLogger(__name__)

MODULE = "vllm_router.launch_router"
REQUEST_TIMEOUT_S = 3600
START_S = 60.0
NUM_PORT_TRIES = 3
STOP_GRACE_S = 5.0
REGISTER_S = 10
"""How long a worker may take to answer the router when it is registered; it has confirmed a version just before."""
_POLL_S = 0.1

DEFAULTS: tuple[tuple[str, ...], ...] = (
    ("--policy", "consistent_hash"),
    ("--log-level", "error"),
    ("--request-timeout-secs", str(REQUEST_TIMEOUT_S)),
    ("--worker-startup-timeout-secs", str(REGISTER_S)),
    ("--worker-startup-check-interval", "1"),
    ("--health-check-timeout-secs", "60"),
    ("--health-success-threshold", "1"),
    ("--disable-retries",),
    ("--disable-circuit-breaker",),
)
"""What vime sets unless the user does. An engine that stands still while weights change stays a worker, and nothing is
sent to another one behind vime's back: vime itself fences engines and sends groups back."""


@dataclass(frozen=True)
class RouterLaunch:
    """Everything that one router is started from. `port` 0 lets the system choose; `extra_args` are the router's own
    options, without a prefix."""

    host: str
    port: int
    log_path: Path
    extra_args: tuple[str, ...] = ()
    metrics_host: str = "127.0.0.1"
    """Where its `/metrics` listens, unless `extra_args` say otherwise."""


def is_installed() -> bool:
    """Whether a router can be started here."""
    return importlib.util.find_spec("vllm_router") is not None


def router_command(launch: RouterLaunch, prometheus_port: int) -> list[str]:
    """The command line; what the user gives comes last and wins."""
    given = {option_name(word) for word in launch.extra_args if word.startswith("--")}
    argv = [sys.executable, "-m", MODULE, "--host", launch.host, "--port", str(launch.port)]
    metrics = (("--prometheus-host", launch.metrics_host), ("--prometheus-port", str(prometheus_port)))
    for words in (*DEFAULTS, *metrics):
        if option_name(words[0]) not in given:
            argv += words
    return [*argv, *launch.extra_args]


def metrics_address(argv: Sequence[str]) -> tuple[str, int]:
    """Host and port of the `/metrics` that a command line of `router_command` asks for."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--prometheus-host")
    parser.add_argument("--prometheus-port", type=int)
    found, _ = parser.parse_known_args(argv)
    return found.prometheus_host, found.prometheus_port


class _PortLostError(EngineStartError):
    """Another program took a port between its choice and the router's start."""


class RouterServer:
    """Owns one router without workers. Synchronous."""

    def __init__(self, launch: RouterLaunch, *, port_timeout_s: float = 0.0) -> None:
        """Start it, and wait until it answers. A router before it may take `port_timeout_s` to free the port.

        Raises:
            EngineStartError: the port is taken, or the router did not come up; with its last log lines.
        """
        self._host, self._log_path = launch.host, launch.log_path
        for _ in range(NUM_PORT_TRIES - 1):
            self._start(launch, port_timeout_s)
            with suppress(_PortLostError):
                self._wait_ready()
                return
        self._start(launch, port_timeout_s)
        self._wait_ready()

    def _start(self, launch: RouterLaunch, port_timeout_s: float) -> None:
        self._port = claim_port(launch.host, launch.port, port_timeout_s)
        started = dataclasses.replace(launch, port=self._port)
        argv = router_command(started, claim_port(launch.metrics_host, 0))
        self.metrics_address = metrics_address(argv)
        """Host and port of its `/metrics`."""
        self._process = SupervisedProcess(argv, {}, launch.log_path, stop_grace_s=STOP_GRACE_S)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return self._host, self._port

    @property
    def pid(self) -> int:
        """Process id of its supervisor."""
        return self._process.pid

    def poll(self) -> int | None:
        """None while it runs, its exit status afterwards."""
        return self._process.poll()

    def stop(self) -> None:
        """End it. Safe to call twice."""
        self._process.stop()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while not answers(f"http://{self._host}:{self._port}/liveness"):
            status = self.poll()
            if status is None and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                continue
            self.stop()
            how = f"was not ready after {START_S:g} s" if status is None else f"ended with status {status}"
            lines = last_lines(self._log_path)
            tail = "".join(f"\n  | {line}" for line in lines)
            lost_a_port = status is not None and any("Address already in use" in line for line in lines)
            raise (_PortLostError if lost_a_port else EngineStartError)(
                f"The router at {self._host}:{self._port} {how}. Last log lines:{tail}\n",
                next_step="Check the --router-* flags.",
            )


class RouterWorkers:
    """Registers engines with a router and takes them out. Create it inside a running event loop; close it."""

    def __init__(self, host: str, port: int) -> None:
        self._http = EngineHttp(f"http://{host}:{port}", name="Router", control_timeout_s=REGISTER_S + 5.0)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def addresses(self) -> list[str]:
        """Base URLs of all workers. Raises `EngineError` when the router doesn't tell."""
        listed: dict[str, Any] = await self._http.json("GET", "/list_workers")
        return [str(url).rstrip("/") for url in listed["urls"]]

    async def set(self, serving: Collection[str], out_of: Sequence[str]) -> list[str]:
        """Of the engines `out_of` have exactly `serving` registered; workers of others stay as they are.

        Returns those that could not be registered. Raises `EngineError` when the router doesn't answer.
        """
        known = set(await self.addresses())
        for address in sorted((known & set(out_of)) - set(serving)):
            await self._change("/remove_worker", address)
        new = sorted(set(serving) - known)
        return [address for address in new if not await self._change("/add_worker", address)]

    async def _change(self, route: str, address: str) -> bool:
        try:
            await self._http.call("POST", route, params={"url": address})
        except EngineError as error:
            logger.warning("%s of %s: %s", route, address, error)
            return False
        return True
