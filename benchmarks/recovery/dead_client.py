"""How long the queue is closed when its coordinator's JuiceFS client dies, beyond the release of its locks."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from benchmarks.history import open_as_coordinator
from storage.pool import Pool
from tests.juicefs.two_mounts import TwoMounts
from vime.errors import CoordinatorBusyError

POLL_S = 0.1
RELEASE_S = 120.0
HOLD = """
import fcntl, sys, time
from pathlib import Path
from benchmarks.history import open_as_coordinator
root = Path(sys.argv[1])
coordinator = open_as_coordinator(root)
lock = open(root / "plain.lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


def failovers_after_a_dead_client(volume: TwoMounts, *, repeats: int) -> dict[str, list[float]]:
    """Kill client and coordinator together, as when their host dies; a successor waits at the other client.

    Beside the queue the dead client holds a plain lock on another file, whose release is what the file system takes.
    """
    values: dict[str, list[float]] = {}
    for _ in range(repeats):
        volume.up()
        folder = volume.new_folder()
        Pool.create(folder / "pool", "run", profile="juicefs", declaration=volume.declaration).close()
        words = [sys.executable, "-c", HOLD, str(volume.at_peer(folder) / "pool")]
        with subprocess.Popen(words, env=volume.environment(), stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout is not None
            if holder.stdout.readline() != "held\n":
                raise RuntimeError("the first coordinator did not start")
            release = _Release(folder / "pool" / "plain.lock")
            died = time.monotonic()
            volume.kill_client(volume.there)
            os.kill(holder.pid, signal.SIGKILL)
            release.start()
            opened = _opened_at(folder / "pool", died + RELEASE_S)
            release.join(RELEASE_S)
        released_s = release.at - died
        gap_s = opened - died
        for name, value in (
            ("juicefs_gap_s", gap_s),
            ("juicefs_lock_release_s", released_s),
            ("juicefs_gap_over_release_s", gap_s - released_s),
        ):
            values.setdefault(name, []).append(value)
    return values


def _opened_at(root: Path, deadline: float) -> float:
    """When a coordinator had the queue open."""
    while True:
        try:
            open_as_coordinator(root).close()
            return time.monotonic()
        except CoordinatorBusyError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)


class _Release(threading.Thread):
    """Waits for a lock that another client holds; `at` is when it was free."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self._path = path
        self.at = float("inf")

    def run(self) -> None:
        with self._path.open("r+") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self.at = time.monotonic()
                    return
                except BlockingIOError:
                    time.sleep(POLL_S)
