"""A server in a process of its own that ends with whoever started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from vime.backends.vllm_utils.supervisor import unlink_listed

_SUPERVISOR = "vime.backends.vllm_utils.supervisor"


class SupervisedProcess:
    """A command under a small supervisor, which ends it and all that it started when this process ends in whatever way.

    It runs in a session of its own, and the shared-memory segments that it leaves are removed.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log_path: Path, *, stop_grace_s: float) -> None:
        """Start it with the variables `env` added. The log of a process before it becomes `<name>.previous.log`."""
        self._stop_grace_s = stop_grace_s
        log_path.parent.mkdir(parents=True, exist_ok=True)
        if log_path.exists():
            log_path.replace(log_path.with_suffix(".previous.log"))
        ledger = log_path.with_suffix(".segments")
        unlink_listed(ledger)
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _SUPERVISOR, str(stop_grace_s), str(ledger), *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(env),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        return self._process.pid

    def poll(self) -> int | None:
        """None while the process runs, its exit status afterwards."""
        return self._process.poll()

    def stop(self) -> None:
        """End the process and everything it started. Safe to call twice."""
        if self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(self._stop_grace_s + 10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the kernel then ends the command's processes one after another
            self._process.wait()
