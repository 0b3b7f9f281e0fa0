"""Starts processes that have imported what they need: forks of one that has.

    python -m benchmarks.chaos.fork_server SOCKET [MODULE ...]

It ends with its standard input.

Most of a session's start is imports, above all of torch and Megatron by each trainer rank. A process that comes
from here runs the same code with the same arguments and environment as one that is started anew, and dies as it does.
The server has one thread and does nothing but import, so its forks find nothing half done.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.chaos.fork_client import LENGTH_BYTES

SAFE_THREAD = "jemalloc_bg_thd"
"""Of pyarrow's memory allocator, which looks after itself in forks."""


class ForkServer:
    """Listens at a path for what is to be started."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._wakes, self._wakened = socket.socketpair()
        self._wakes.setblocking(False)
        self._wakened.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakened.fileno())
        self._selector = selectors.DefaultSelector()
        self._listener.bind(path)
        self._listener.listen(64)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._selector.register(0, selectors.EVENT_READ)
        self._followed: dict[int, socket.socket] = {}
        """Process id -> where its end is told."""

    def serve(self) -> dict[str, Any]:
        """Fork a process for each request, until standard input ends. A fork returns what it is to become."""
        while True:
            for key, _ in self._selector.select():
                if key.fd == 0:
                    os._exit(0)  # nothing of this process needs an end in order
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    request, descriptors = _receive(connection)
                    child = os.fork()
                    if child == 0:
                        connection.close()
                        self._leave(descriptors)
                        return request
                    self._follow(child, connection, descriptors)
                else:
                    with contextlib.suppress(BlockingIOError):
                        self._wakes.recv(4096)
            self._reap()

    def _follow(self, child: int, connection: socket.socket, descriptors: Sequence[int]) -> None:
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(OSError):
            connection.sendall(child.to_bytes(LENGTH_BYTES, "big"))
        self._followed[child] = connection

    def _reap(self) -> None:
        """Tell of the processes that have ended."""
        while self._followed:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                return
            with contextlib.suppress(OSError), self._followed.pop(child) as connection:
                connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(LENGTH_BYTES, "big", signed=True))

    def _leave(self, descriptors: Sequence[int]) -> None:
        """In a fork: a process group of its own, its own outputs, and nothing of the server's."""
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for each in (self._listener, self._wakes, self._wakened, *self._followed.values()):
            each.close()
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, descriptor in enumerate([nothing, *descriptors]):
            os.dup2(descriptor, number)
            os.close(descriptor)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], Sequence[int]]:
    head, descriptors, _, _ = socket.recv_fds(connection, LENGTH_BYTES, 2)
    length, content = int.from_bytes(head, "big"), b""
    while len(content) < length:
        content += connection.recv(length - len(content))
    request: dict[str, Any] = json.loads(content)
    return request, descriptors


def become(request: dict[str, Any]) -> None:
    """Run what was asked for, as the main module of this process."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    gc.unfreeze()
    if "worker" in request:
        words = _in_its_environment(request["worker"])
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
    else:
        sys.argv = [request["module"], *request["words"]]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def _in_its_environment(words: list[str]) -> list[str]:
    """What Ray's own script does with the words that are meant for it: set variables. The words of the worker."""
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import update_envs
    from ray._private.workers.setup_worker import parser

    mine, others = parser.parse_known_args(words)
    update_envs(RuntimeEnvContext.deserialize(mine.serialized_runtime_env_context or "{}").env_vars)
    return list(others)


def main(path: str, *modules: str) -> None:
    for name in modules:
        importlib.import_module(name)
    threads = {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")} - {"python", SAFE_THREAD}
    if "ray" in sys.modules or threads:
        raise RuntimeError(f"Ray or threads {threads} came with {modules}: forks would inherit a part of them")
    gc.collect()
    gc.freeze()
    become(ForkServer(path).serve())


if __name__ == "__main__":
    main(*sys.argv[1:])
