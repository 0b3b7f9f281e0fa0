"""Hands lines to a sink's process without ever waiting for it."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

CAPACITY = 256
"""Lines that may wait for a sink."""
CLOSE_TIMEOUT_S = 30.0


class SinkFeed:
    """A bounded queue, a thread that empties it into a process, and that process."""

    def __init__(
        self, name: str, command: Sequence[str], first_line: bytes, log: Path, *, capacity: int = CAPACITY
    ) -> None:
        """Returns at once. `log`: what the process and its libraries print."""
        self.name, self.dropped = name, 0
        self._command, self._log = list(command), log
        self._lines: queue.Queue[bytes | None] = queue.Queue(capacity)
        self._lines.put_nowait(first_line)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock, self._is_killed = threading.Lock(), False
        self._failure, self._is_late, self._is_told = "", False, False
        self._thread = threading.Thread(target=self._copy, name=f"sink {name}", daemon=True)
        self._thread.start()

    def offer(self, line: bytes) -> None:
        """Hand over a line, or count it as dropped; never waits."""
        if self._failure:
            self.dropped += 1
            return
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.dropped += 1
            self._is_late = True

    def problem(self) -> str:
        """Once, a sentence that says what is wrong with the sink; empty otherwise."""
        if self._is_told or not (self._failure or self._is_late):
            return ""
        self._is_told = True
        why = self._failure or f"it doesn't keep up, and {self._lines.maxsize} points wait for it"
        return f"{self.name}: {why}. Training goes on; metrics.jsonl has every point. See {self._log}."

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> str:
        """Let the process write what it has and end; one that takes longer is killed. What was lost, in words."""
        until = time.monotonic() + timeout_s
        try:
            self._lines.put(None, timeout=timeout_s)
        except queue.Full:
            self._is_late = True
        self._thread.join(max(0.0, until - time.monotonic()))
        words = [self.problem()]
        if self._thread.is_alive():
            self._kill()
            self._thread.join()
            words.append(f"{self.name} did not end within {timeout_s:g} s and was killed; its last points may be lost.")
        self.dropped += sum(line is not None for line in self._rest())
        if self.dropped:
            words.append(f"{self.name} was not given {self.dropped} points.")
        return " ".join(filter(None, words))

    def _copy(self) -> None:
        """The thread."""
        try:
            with self._log.open("ab") as log:
                process = self._start(log.fileno())
        except OSError as error:
            self._failure = str(error)
            return
        assert process.stdin is not None
        assert process.stdout is not None
        is_broken = False
        try:
            with process.stdin as pipe:
                while (line := self._lines.get()) is not None:
                    pipe.write(line + b"\n")
                    pipe.flush()
        except BrokenPipeError:
            is_broken = True
        with process.stdout as status:
            reason = status.read().decode(errors="replace")
        status_code = process.wait()
        if (reason or status_code or is_broken) and not self._is_killed:
            self._failure = reason or f"its process ended with status {status_code}"

    def _start(self, log: int) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        with self._lock:
            if self._is_killed:
                raise InterruptedError("it was closed before it began")
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # an interrupt at the terminal is the run's; a kill takes helpers along
            )
            return self._process

    def _kill(self) -> None:
        with self._lock:
            self._is_killed = True
            if self._process is not None and self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _rest(self) -> list[bytes | None]:
        found: list[bytes | None] = []
        while not self._lines.empty():
            found.append(self._lines.get_nowait())
        return found
