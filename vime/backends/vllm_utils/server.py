"""One vLLM server as a supervised subprocess."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Self

from vime.backends.vllm_utils.kept import Keeping, KeptEngine
from vime.backends.vllm_utils.launch import EngineLaunch, engine_command, launch_record
from vime.backends.vllm_utils.lease import end_claimed
from vime.backends.vllm_utils.listening import answers, claim_port
from vime.backends.vllm_utils.plugin.self_test import DIFFERS, TESTED_VERSIONS
from vime.backends.vllm_utils.startup_log import last_lines, startup_phase
from vime.backends.vllm_utils.supervised import SupervisedProcess
from vime.errors import EngineStartError

_POLL_S = 0.25


def _ignore_progress(_phase: str, _seconds: float) -> None:
    pass


class EngineServer:
    """Owns one engine: its processes, its log and what they leave behind. Synchronous; use it with `with`.

    The engine runs in a session of its own under a small supervisor, which ends it when this process ends in whatever
    way, and removes the engine's shared-memory segments. One with a `keeping` outlives this process for a while.
    """

    def __init__(self, launch: EngineLaunch, *, stop_grace_s: float = 5.0, keeping: Keeping | None = None) -> None:
        """`launch.port` 0 lets the system choose; `launch` then holds the chosen one once started."""
        self.launch = launch
        self._stop_grace_s, self._keeping = stop_grace_s, keeping
        self._process: SupervisedProcess | KeptEngine | None = None
        self._started_at = 0.0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """Base URL of the engine."""
        return f"http://{self.launch.host}:{self.launch.port}"

    @property
    def pid(self) -> int | None:
        """Process id of the supervisor, None before the start."""
        return None if self._process is None else self._process.pid

    def start(self, *, port: int | None = None, port_timeout_s: float = 0.0) -> None:
        """Start the processes and return at once, at another `port` than that of `launch` if one is given.

        Raises `EngineStartError` when the port is taken for longer than `port_timeout_s`.
        """
        wanted = self.launch.port if port is None else port
        if self._keeping is not None:
            end_claimed(self._keeping.claim)
        self.launch = replace(self.launch, port=claim_port(self.launch.host, wanted, port_timeout_s))
        command = engine_command(self.launch)
        if self._keeping is None:
            self._process = SupervisedProcess(
                command.argv, command.env, self.launch.log_path, stop_grace_s=self._stop_grace_s
            )
        else:
            self._process = KeptEngine.start(
                self._keeping,
                command.argv,
                command.env,
                self.launch.log_path,
                stop_grace_s=self._stop_grace_s,
                address=(self.launch.host, self.launch.port),
                settings=launch_record(self.launch, self._keeping.session),
            )
        self._started_at = time.monotonic()

    def take_over(self) -> list[str] | None:
        """Take over the engine that outlived its driver, when it was started from what this one would be.

        Returns None without one, else the differences in words: with any the engine is ended, not taken over.
        """
        found = None if self._keeping is None else KeptEngine.find(self._keeping)
        if found is None or self._keeping is None:
            return None
        differences = found.differences(launch_record(self.launch, self._keeping.session))
        if differences:
            found.stop()
        else:
            self._process = found
            self.launch = replace(self.launch, port=found.claim.port)
            self._started_at = time.monotonic()
        return differences

    def wait_ready(
        self, on_progress: Callable[[str, float], None] = _ignore_progress, timeout_s: float = 600.0
    ) -> float:
        """Wait until the engine answers; returns the seconds since its start.

        `on_progress(phase, seconds)` is called when the phase changes and then every 5 s. Raises `EngineStartError`
        with the last log lines when the engine ends or `timeout_s` passes; the engine is stopped first.
        """
        reported, next_report_s = "", 0.0
        while True:
            seconds = time.monotonic() - self._started_at
            if self.poll() is not None:
                raise self._start_error(f"ended with status {self.poll()} after {seconds:.0f} s")
            if answers(f"{self.address}/health"):
                on_progress("ready", seconds)
                return seconds
            if seconds > timeout_s:
                self.stop()
                raise self._start_error(f"was not ready after {timeout_s:.0f} s")
            phase = startup_phase("\n".join(last_lines(self.launch.log_path, num_lines=1000)))
            if phase != reported or seconds >= next_report_s:
                on_progress(phase, seconds)
                reported, next_report_s = phase, seconds + 5.0
            time.sleep(_POLL_S)

    def poll(self) -> int | None:
        """None while the engine runs, its exit status afterwards; raises `EngineStartError` before the start."""
        if self._process is None:
            raise EngineStartError("The engine has not been started.", next_step="Call start() first.")
        return self._process.poll()

    def stop(self) -> None:
        """End the engine and everything it started. Safe to call twice, and before the start."""
        if self._process is not None:
            self._process.stop()

    def _start_error(self, what: str) -> EngineStartError:
        lines = last_lines(self.launch.log_path)
        tail = "\n".join(f"  | {line}" for line in lines) or "  | (the log is empty)"
        return EngineStartError(
            f"The engine for {self.launch.hf_checkpoint} at {self.address} {what}. Last log lines:\n{tail}\n",
            next_step=_next_step("\n".join(lines), self.launch),
        )


def _next_step(log_tail: str, launch: EngineLaunch) -> str:
    if not launch.hf_checkpoint.exists():
        return f"Give an existing checkpoint folder: {launch.hf_checkpoint} does not exist."
    if DIFFERS in log_tail:
        return TESTED_VERSIONS
    if "address already in use" in log_tail.lower():
        return "Another program took the port meanwhile; start the engine again."
    if "memory" in log_tail.lower():
        return "Give the engine more memory, or ask for a smaller cache."
    return f"The whole log is {launch.log_path}."
