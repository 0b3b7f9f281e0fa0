"""One session of the job under fire: started, killed as planned, and seen to its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos.kills import Kill, Layout, Victim
from storage.files import write_atomically
from tests.end_to_end.jobs import REPOSITORY, Job
from vime.utils.kill_points import KILL_FILE_VARIABLE

MARK_VARIABLE = "VIME_CHAOS_CAMPAIGN"
"""Every process of a campaign inherits it, so that one which outlives its session is found."""
START_S = 300.0
SURVIVE_S = 180.0
"""In which a session goes on after a kill or ends by itself."""
STOP_S = 120.0
ORPHAN_S = 30.0
SURVIVING_STEPS = 2
POLL_S = 0.02


@dataclass(frozen=True)
class Outcome:
    """What a session came to."""

    killed: bool
    """False when the session ended before the kill's moment came."""
    how: str
    """In words: how the session ended."""
    stuck: bool
    """It neither went on nor ended in time."""
    orphans: list[str]


class Campaign:
    """One run folder that session after session is started in."""

    def __init__(self, folder: Path, *, standin: bool) -> None:
        self.folder, self._standin = folder, standin
        self.job = Job(folder, flags=_flags(standin=standin))
        self._mark = str(folder.resolve())
        self._kill_file = folder / "kill"

    def prepare(self) -> None:
        """Model and prompts, once."""
        if not self.job.model.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.job.prepare()

    def run(self, kill: Kill, num_rollout: int) -> Outcome:
        """Start a session, kill as planned, and wait for what comes of it."""
        with self._started(kill.layout, num_rollout) as (process, log):
            killed = self._kill(kill, process)
            how, stuck = self._aftermath(process, killed=killed)
        return Outcome(killed, f"{how} ({log.name})", stuck, self._orphans())

    def finish(self, num_rollout: int, layout: Layout) -> Outcome:
        """A session without a kill, to the run's end."""
        with self._started(layout, num_rollout) as (process, log):
            stuck = not _wait(lambda: process.poll() is not None, START_S + 20.0 * num_rollout)
        how = f"status {process.returncode} ({log.name})"
        return Outcome(killed=False, how=how, stuck=stuck or process.returncode != 0, orphans=self._orphans())

    @contextlib.contextmanager
    def _started(self, layout: Layout, num_rollout: int) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        """A session's process and its log; at the end nothing of it runs."""
        flags = {
            **self.job.flags,
            "--actor-num-gpus-per-node": layout.num_trainers,
            "--rollout-num-gpus": layout.num_engines,
        }
        job = replace(self.job, num_rollout=num_rollout, flags=flags)
        command = job.standin_command() if self._standin else job.command()
        logs = self.folder / "sessions"
        logs.mkdir(exist_ok=True)
        log = logs / f"{len(list(logs.iterdir())):04d}.log"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
            MARK_VARIABLE: self._mark,
            KILL_FILE_VARIABLE: str(self._kill_file.resolve()),
        }
        self._disarm()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env=environment,
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            yield process, log
        finally:
            self._disarm()
            if process.poll() is None:
                self._end_tree(process)

    def _kill(self, kill: Kill, process: subprocess.Popen[bytes]) -> bool:
        """Wait for the moment and kill; False when the session ended before."""
        steps = self._num_steps()

        def over() -> bool:
            return process.poll() is not None

        wanted = 0 if kill.from_start else 1 if kill.point is None else kill.steps_before
        if not _wait(lambda: over() or self._num_steps() >= steps + wanted, START_S) or over():
            return False
        if kill.point is not None:
            write_atomically(self._kill_file, kill.point.value.encode())
            return _wait(lambda: over() or not self._kill_file.exists(), SURVIVE_S) and not self._kill_file.exists()
        if _wait(over, kill.delay_s):
            return False
        for pid in self._victims(kill, process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return True

    def _victims(self, kill: Kill, process: subprocess.Popen[bytes]) -> list[int]:
        if kill.victim is Victim.DRIVER:
            return [process.pid]
        if kill.victim is Victim.TREE or kill.victim is None:
            return [found.pid for found in self._alive()]
        ids = self.job.processes()[{Victim.COORDINATOR: "coordinator"}.get(kill.victim, f"{kill.victim.value}s")]
        candidates = list(_flat(ids))
        return [candidates[int(kill.draw * len(candidates))]]

    def _aftermath(self, process: subprocess.Popen[bytes], *, killed: bool) -> tuple[str, bool]:
        """How the session went on, in words; and whether it got stuck."""
        steps = self._num_steps()

        def is_settled() -> bool:
            return process.poll() is not None or (killed and self._num_steps() >= steps + SURVIVING_STEPS)

        if not _wait(is_settled, SURVIVE_S):
            return f"no step and no end in {SURVIVE_S:g} s", True
        if process.poll() is not None:
            return f"ended with status {process.returncode}", False
        os.killpg(process.pid, signal.SIGINT)
        if not _wait(lambda: process.poll() is not None, STOP_S):
            return f"went on, and did not stop in {STOP_S:g} s", True
        return f"went on, and stopped with status {process.returncode}", False

    def _num_steps(self) -> int:
        return len(steps_of(self.job.run))

    def _orphans(self) -> list[str]:
        """Processes of the session that are still there; they are ended."""
        _wait(lambda: not self._alive(), ORPHAN_S)
        left = self._alive()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return [f"{process.pid} {' '.join(_command(process))}" for process in left]

    def _end_tree(self, process: subprocess.Popen[bytes]) -> None:
        for found in self._alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.kill()
        process.wait(STOP_S)

    def _alive(self) -> list[psutil.Process]:
        """All processes that inherited the campaign's mark."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                marked = process.environ().get(MARK_VARIABLE) == self._mark
                if marked and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def _disarm(self) -> None:
        for path in (self._kill_file, self._kill_file.with_suffix(".taken")):
            path.unlink(missing_ok=True)


def _flags(*, standin: bool) -> dict[str, Any]:
    flags: dict[str, Any] = {"--save-interval": 2, "--rollout-queue-lease-seconds": 6, "--update-weight-timeout": 60}
    return {**flags, "--parity-probes": 0} if standin else flags  # no trainer agrees with a stand-in


def _wait(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _flat(ids: Any) -> Iterator[int]:
    if isinstance(ids, list):
        for item in ids:
            yield from _flat(item)
    else:
        yield int(ids)


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline()[:4])
    except psutil.Error:
        return ["(ended)"]


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The records of all steps of all sessions, in the order they were written; a torn line is left out."""
    path, found = run / "metrics.jsonl", []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if "policy_version" in record:
                found.append(record)
    return found
