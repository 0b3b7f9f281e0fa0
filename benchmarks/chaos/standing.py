"""What outlives the sessions of a campaign, so that each begins soon: a fork server, and a Ray cluster to join."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.chaos.fork_client import LENGTH_BYTES, SOCKET_VARIABLE, send_request
from benchmarks.chaos.processes import MARK_VARIABLE, MarkedProcesses
from tests.end_to_end.jobs import REPOSITORY

START_S = 300.0
"""The longest that the server and the cluster may take to start, on a busy machine."""
MODULES = (
    "vime.backends.megatron_utils.trainer",
    "transformers.models.auto.tokenization_auto",
    "pipeline.trainer_worker",
    "pipeline.coordinator",
    "pipeline.producer",
    "pipeline.publisher",
    "pipeline.routers",
    "pipeline.resume_words",
    "pipeline.metric_sinks.sinks",
    "tests.end_to_end.rewards",
    "tests.support.standin_engine",
    "tests.support.tiny_models",
)
"""Imported by the server, once for all. None of them imports Ray, which reads its environment when it is imported."""
END_S = 20.0
CLUSTER_STARTS = 3
"""Ray gives a node 30 s, which may be too few on a busy machine."""
NUM_SLOTS = 4
"""Devices of the cluster: as many as the largest layout needs."""
_POLL_S = 0.05


class Driver(Protocol):
    """A session's first process, as far as a campaign uses it: that of `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


class ForkedDriver:
    """A driver that the server has forked, and whose end it tells."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.pid = int.from_bytes(connection.recv(LENGTH_BYTES), "big")
        connection.setblocking(False)
        self._status: int | None = None

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        if self._status is None:
            try:
                told = self._connection.recv(LENGTH_BYTES)
            except BlockingIOError:
                return None
            self._connection.close()
            if not told:
                raise RuntimeError("the fork server has ended")
            self._status = int.from_bytes(told, "big", signed=True)
        return self._status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Raises `TimeoutError`."""
        deadline = time.monotonic() + (timeout or float("inf"))
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
            time.sleep(_POLL_S)
        return status


class Forks:
    """A fork server's process. Close it."""

    def __init__(self, path: Path, modules: Sequence[str], environment: dict[str, str]) -> None:
        """Returns when it has imported the modules. `environment` is what is seen of its forks from outside."""
        self._path = str(path)
        self._process = _started(["benchmarks.chaos.fork_server", self._path, *modules], environment)
        self.pid = self._process.pid
        deadline = time.monotonic() + START_S
        while not path.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise RuntimeError("the fork server did not start")
            time.sleep(_POLL_S)

    def start(self, command: Sequence[str], log: Path, environment: dict[str, str]) -> ForkedDriver:
        """A fork that becomes `python -m MODULE WORDS` under that environment, and writes to `log`."""
        _, flag, module, *words = command
        assert flag == "-m"
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._path)
        request = {"module": module, "words": words, "environment": environment, "folder": str(REPOSITORY)}
        with log.open("wb") as output:
            send_request(connection, request, output.fileno(), output.fileno())
        return ForkedDriver(connection)

    def close(self) -> None:
        _end(self._process)


class Standing:
    """The server and the cluster. Close it."""

    def __init__(self, mark: str, **variables: str) -> None:
        """Returns when both are there. All workers of the cluster have `variables` in their environments."""
        self._folder = Path(tempfile.mkdtemp(prefix="vime-chaos-"))
        path = self._folder / "fork"
        environment = {
            **os.environ,
            **variables,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
            "OPENBLAS_NUM_THREADS": "1",  # threads of the server's would be missing in its forks
            MARK_VARIABLE: mark,
            SOCKET_VARIABLE: str(path),
        }
        self._forks = Forks(path, MODULES, environment)
        try:
            self._cluster, self.address = self._started_cluster(environment)
            """The address is the cluster's."""
        except BaseException:
            self._forks.close()
            raise

    def start(self, command: Sequence[str], log: Path, environment: dict[str, str]) -> ForkedDriver:
        """A driver that joins the cluster."""
        return self._forks.start(command, log, {**environment, "RAY_ADDRESS": self.address})

    def _started_cluster(self, environment: dict[str, str]) -> tuple[subprocess.Popen[bytes], str]:
        for attempt in range(CLUSTER_STARTS):
            folder = self._folder / f"ray{attempt}"
            cluster = _started(["benchmarks.chaos.standing_cluster", str(folder), str(NUM_SLOTS)], environment)
            assert cluster.stdout is not None
            if address := cluster.stdout.readline().decode().strip():
                return cluster, address
            _end(cluster)
        raise RuntimeError(f"the Ray cluster did not start {CLUSTER_STARTS} times")

    def exempt(self, processes: MarkedProcesses) -> None:
        """Have the server and the cluster left out of the processes of a session; the server's forks are of one."""
        processes.leave_out(cluster=self._cluster.pid, server=self._forks.pid)

    def close(self) -> None:
        """End both, and what they hold."""
        _end(self._cluster)
        self._forks.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _started(words: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """A module that ends with its standard input."""
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        env=environment,
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
