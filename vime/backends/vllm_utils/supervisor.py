"""Small process between a launcher and an engine, which ends the engine with its launcher and cleans up after it.

    python -m vime.backends.vllm_utils.supervisor GRACE_SECONDS LEDGER COMMAND [ARGUMENT ...]

It imports the standard library only and has one thread. It watches its own parent (a process, not a thread, so a
launcher may start it from anywhere), adopts processes that the engine orphans, and on the end of either side stops
every one of them and unlinks the shared-memory segments that they had mapped. Should it be killed itself, the kernel
kills the engine's processes one after another (see `vime.backends.vllm_utils.death`), and whoever starts the next
engine with the same LEDGER, a file that names the segments, unlinks them first (`unlink_listed`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

from vime.backends.vllm_utils.death import die_with_parent

_PR_SET_CHILD_SUBREAPER = 36
_SHARED_MEMORY = "/dev/shm/"
_POLL_S = 0.2
_POLLS_PER_SCAN = 5


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`, read from /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return found[1:]


def start_time(pid: int) -> str | None:
    """When a process began, in the kernel's ticks, so that a reused process id is not mistaken for it.

    None when it has ended, also when nobody has asked for its status yet.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def mapped_segments(pids: Iterable[int]) -> set[str]:
    """Paths of the shared-memory files that the processes have mapped.

    They are matched by inode: the C library makes a named semaphore under a temporary name, and that is the one that
    /proc shows.
    """
    inodes: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if _SHARED_MEMORY in line:
                    inodes.add(int(line.split()[4]))
    with os.scandir(_SHARED_MEMORY) as entries:
        return {entry.path for entry in entries if entry.inode() in inodes}


def unlink_listed(ledger: Path) -> None:
    """Unlink the segments that a ledger names, and the ledger. Their names are random, so they are nobody else's."""
    if not ledger.exists():
        return
    for line in ledger.read_text().splitlines():
        if line.startswith(_SHARED_MEMORY):
            Path(line).unlink(missing_ok=True)
    ledger.unlink()


class Supervisor:
    """Runs a command until it ends, nobody wants it any more or a stop is asked, and leaves nothing of it behind."""

    def __init__(self, command: list[str], grace_s: float, ledger: Path) -> None:
        """Start the command, which has `grace_s` seconds to end in order."""
        self._grace_s, self._ledger = grace_s, ledger
        self._stop_asked = False
        self._segments: set[str] = set()
        self._listed: set[str] = set()
        """Those of them that the ledger names."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask_stop)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._parent = os.getppid()
        self._engine = subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_parent)

    def run(self) -> int:
        """Watch until the engine ends, nobody wants it or a stop is asked; returns the engine's exit status."""
        polls = 0
        while self._engine.poll() is None and not self._stop_asked and self.is_wanted():
            if polls % _POLLS_PER_SCAN == 0:
                self._note_segments()
            polls += 1
            time.sleep(_POLL_S)
        self._end_all()
        status = self._engine.poll()
        return 0 if self._stop_asked else 128 - status if status is not None and status < 0 else status or 0

    def is_wanted(self) -> bool:
        """Whether the launcher still runs."""
        return os.getppid() == self._parent

    def _note_segments(self) -> None:
        """Where the ledger can't be written the engine goes on; a supervisor that is killed then leaves segments."""
        self._segments |= mapped_segments(descendants(os.getpid()))
        if self._segments != self._listed:
            new = self._ledger.with_name(f"{self._ledger.name}.new")
            try:
                new.write_text("".join(f"{path}\n" for path in sorted(self._segments)))
                new.replace(self._ledger)
                self._listed = set(self._segments)
            except OSError:
                with contextlib.suppress(OSError):
                    new.unlink(missing_ok=True)

    def _end_all(self) -> None:
        self._note_segments()
        if self._engine.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._engine.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._engine.wait(self._grace_s)
        while remaining := descendants(os.getpid()):
            for pid in remaining:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._engine.poll()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.02)
        unlink_listed(self._ledger)
        for path in self._segments:
            Path(path).unlink(missing_ok=True)

    def _ask_stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stop_asked = True


if __name__ == "__main__":
    sys.exit(Supervisor(sys.argv[3:], float(sys.argv[1]), Path(sys.argv[2])).run())
