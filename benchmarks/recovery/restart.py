"""A restart after `kill -9` of every process, against a cold start of the same job."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.chaos.launch import launch
from benchmarks.chaos.processes import MarkedProcesses
from benchmarks.chaos.step_log import StepLog
from tests.end_to_end.jobs import Job

FIRST_STEP_S = 600.0
"""The longest that a start may take to its first step."""
POLL_S = 0.02


class StartedJob:
    """A job of the stand-in or the real engine, and its steps."""

    def __init__(self, job: Job, process: subprocess.Popen[bytes], log: Path, mark: MarkedProcesses) -> None:
        self._process, self._log, self.marked = process, log, mark
        self._steps = StepLog(job.run)
        self._before = self._steps.count()

    def wait_for_steps(self, count: int, timeout_s: float = FIRST_STEP_S) -> None:
        """Until the session has taken so many. Raises `RuntimeError` when it ends before, or takes too long."""
        deadline = time.monotonic() + timeout_s
        while self.num_steps() < count:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self._log}: status {self._process.poll()} before step {count}")
            time.sleep(POLL_S)

    def num_steps(self) -> int:
        """Steps of this session so far."""
        return self._steps.count() - self._before


@contextmanager
def started(job: Job, *, standin: bool) -> Iterator[StartedJob]:
    """Start the job; at the end every process of it is killed at once by SIGKILL."""
    mark = MarkedProcesses(str(job.folder.resolve()))
    log = job.folder / f"session_{time.monotonic_ns()}.log"
    process = launch(job, log, mark.mark, standin=standin)
    try:
        yield StartedJob(job, process, log, mark)
    finally:
        mark.end()
        process.wait()


def job_in(folder: Path, *, standin: bool) -> Job:
    """The job that is measured: one rank, one engine, a commit every two steps."""
    flags = {"--save-interval": 2, "--rollout-batch-size": 4, "--n-samples-per-prompt": 2}
    return Job(folder, num_rollout=10_000, flags={**flags, "--parity-probes": 0} if standin else flags)


def restart_over_cold_start(folder: Path, *, standin: bool, repeats: int) -> dict[str, list[float]]:
    """Seconds to the first step, of a cold start and of the restart of the same run after it was killed."""
    suffix = "_standin" if standin else "_real_engine"
    prepared = job_in(folder / f"prepared{suffix}", standin=standin)
    prepared.folder.mkdir()
    prepared.prepare()
    found: dict[str, list[float]] = {}
    for repeat in range(repeats):
        job = replace(prepared, folder=folder / f"run{suffix}_{repeat}")
        shutil.copytree(prepared.folder, job.folder)
        cold = _to_first_step(job, standin=standin, more_steps=2)
        warm = _to_first_step(job, standin=standin, more_steps=0)
        shutil.rmtree(job.folder)
        for name, value in (
            ("cold_start_s", cold),
            ("kill_to_step_s", warm),
            ("kill_to_step_over_cold_start", warm / cold),
        ):
            found.setdefault(name + suffix, []).append(value)
    return found


def _to_first_step(job: Job, *, standin: bool, more_steps: int) -> float:
    """Seconds from the command to the first step of the session, which then takes some more and is killed."""
    begun = time.monotonic()
    with started(job, standin=standin) as session:
        session.wait_for_steps(1)
        seconds = time.monotonic() - begun
        session.wait_for_steps(1 + more_steps)
    return seconds
