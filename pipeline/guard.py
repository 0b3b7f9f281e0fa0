"""Small process beside the driver: when a session ends or its driver is killed, it ends what Ray would leave behind.

    python -m pipeline.guard GRACE_SECONDS RAY_FOLDER

Ray's processes end with the driver's, but some take a minute, a worker can hang in its own exit, and the session's
folder stays. The guard remembers every process below its parent. Once the parent is gone, or sends SIGTERM because the
session is over, it gives them GRACE_SECONDS (engines use them to stop in order and to unlink their shared memory),
kills what is left, waits until that is gone with its ports and memory, and removes RAY_FOLDER. Ray's own agents, which
have nothing to stop in order and would take all of that time, are killed as soon as they are alone. Engines that are
kept for a restarted driver are left alone: their own supervisors end them in time. It imports the standard library
only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from vime.backends.vllm_utils.lease import outlives_driver
from vime.backends.vllm_utils.supervisor import descendants, start_time

GRACE_S = 8.0
MARGIN_S = 30.0
"""What the guard may take beyond its grace before nobody waits for it any more."""
KILLED_S = 15.0
"""How long processes that were killed are waited for."""
_POLL_S = 0.5
_ENDING_POLL_S = 0.1
_RAY_AGENTS = (b"ray::DashboardAgent", b"ray::RuntimeEnvAgent")
"""Titles of processes of Ray that outlive its node manager."""


@contextmanager
def guarded(ray_folder: Path, grace_s: float = GRACE_S) -> Iterator[None]:
    """Run the body with a guard beside it; at its end nothing that it started is left."""
    guard = subprocess.Popen(
        [sys.executable, "-m", "pipeline.guard", str(grace_s), str(ray_folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        guard.terminate()
        try:
            guard.wait(grace_s + MARGIN_S)
        except subprocess.TimeoutExpired:
            guard.kill()
            guard.wait()


def watch(parent: int, grace_s: float, ray_folder: Path) -> None:
    """Until the parent is gone or says that it is over, remember its descendants; then end them."""
    known: dict[int, str] = {}
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: over.set())
    while True:
        for pid in descendants(parent):
            if pid != os.getpid() and pid not in known and (began := start_time(pid)) is not None:
                known[pid] = began
        if os.getppid() != parent or over.wait(_POLL_S):
            break
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(_has_work_to_end(pid, began) for pid, began in known.items()):
        time.sleep(_ENDING_POLL_S)
    kill_and_wait({pid: began for pid, began in known.items() if not outlives_driver(pid)})
    shutil.rmtree(ray_folder, ignore_errors=True)


def kill_and_wait(processes: Mapping[int, str]) -> None:
    """Kill these (process id -> `start_time`), and return when they are gone, with their ports and their memory.

    The kernel may take a while, above all for a GPU's memory; after `KILLED_S` nobody waits any more.
    """
    for pid, began in processes.items():
        if start_time(pid) == began:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + KILLED_S
    while time.monotonic() < deadline and any(start_time(pid) == began for pid, began in processes.items()):
        time.sleep(_ENDING_POLL_S)


def _has_work_to_end(pid: int, began: str) -> bool:
    """Whether the process that began then still runs, and is none of Ray's agents or of those that stay."""
    if start_time(pid) != began or outlives_driver(pid):
        return False
    with contextlib.suppress(OSError):
        return not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(_RAY_AGENTS)
    return False


if __name__ == "__main__":
    watch(os.getppid(), float(sys.argv[1]), Path(sys.argv[2]))
