"""Jobs of `vime train` on whatever devices there are, as the benchmarks start, kill and read them."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.chaos.kills import Victim
from benchmarks.chaos.processes import TITLES, kill_all, title_of
from benchmarks.chaos.step_log import StepLog
from pipeline.devices import visible_gpus
from vime.cli.demo_report import read_steps
from vime.errors import RunFailedError, SettingsError, VimeError

REPOSITORY = Path(__file__).resolve().parents[2]
HEAD = '{"head_dtype": "float32"}'
"""`--hf-overrides` that let the engine multiply the output head in float32, as the trainer does."""
ONE_GPU_SHARE = 0.35
"""Part of a GPU's memory that the engine takes where the trainer has to live on the same one."""
POLL_S = 0.02
AGAIN = "Run the same command with the same --folder again; it goes on after the stages that have ended."
_PARITY = re.compile(r"against the trainer on (\d+) tokens: mean ([\d.e+-]+), p99 ([\d.e+-]+), max ([\d.e+-]+?)[.;]")


class BudgetSpentError(VimeError):
    """The time of one call is over; another call does the rest."""


def device_flags(num_gpus: int) -> list[str]:
    """Placement and precision: trainer and engine get a GPU each, share one, or are processes of the CPU."""
    flags = precision_flags(num_gpus)
    if num_gpus == 1:
        flags += ["--colocate", "--no-offload-train", "--no-offload-rollout", "--flush-cache-interval", "1"]
        flags += ["--vllm-gpu-memory-utilization", str(ONE_GPU_SHARE)]
    return flags


def precision_flags(num_gpus: int) -> list[str]:
    """bf16 with a float32 head on GPUs; on a CPU everything is float32."""
    return ["--bf16", "--vllm-dtype", "bfloat16", "--vllm-hf-overrides", HEAD] if num_gpus else []


def device_words(num_gpus: int) -> str:
    """The same for people."""
    return {0: "processes of the CPU", 1: "one GPU"}.get(num_gpus, "a GPU each")


class RunningJob:
    """The processes of one start of a job, and the steps that it takes."""

    def __init__(self, job: Job, process: subprocess.Popen[bytes]) -> None:
        self._job, self._process = job, process
        self._log = StepLog(job.run)
        self._before = self._log.count()
        self._started = time.monotonic()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def num_steps(self) -> int:
        """Records of this start, and of others that wrote on since; a resume trains some steps anew."""
        return self._log.count() - self._before

    def first_step_s(self) -> float:
        """Wait for the first new step; seconds since the start. Raises `RunFailedError`."""
        self.until(lambda: self.num_steps() > 0)
        return time.monotonic() - self._started

    def until(self, condition: Callable[[], bool], *, poll_s: float = POLL_S) -> None:
        """Raises `RunFailedError` when the job ends before, `BudgetSpentError` after its deadline."""
        while not condition():
            if self.ended and not condition():
                raise self._job.failed(f"ended with status {self._process.returncode}")
            if time.monotonic() > self._job.deadline:
                raise BudgetSpentError(f"{self._job.log.stem}: the time of this call is spent.", next_step=AGAIN)
            time.sleep(poll_s)

    def end(self) -> None:
        """Wait for the job's own end. Raises `RunFailedError` unless it succeeds."""
        self.until(lambda: self.ended)
        if self._process.returncode:
            raise self._job.failed(f"ended with status {self._process.returncode}")

    def tree(self) -> list[psutil.Process]:
        """Its processes, the driver last; none after its end."""
        try:
            driver = psutil.Process(self._process.pid)
            return [*driver.children(recursive=True), driver]
        except psutil.NoSuchProcess:
            return []

    def kill(self, victim: Victim = Victim.TREE) -> None:
        """kill -9 of all processes, or of those of one role. Raises `RunFailedError` when there are none."""
        parts = TITLES.get(victim, ("",))
        victims = [process for process in self.tree() if any(part in title_of(process) for part in parts)]
        if kill_all(victims) == 0:
            raise self._job.failed(f"has no process of the role {victim.value}")
        if victim is Victim.TREE:
            self._process.wait()
        _, left = psutil.wait_procs(victims, timeout=15.0)
        if left:
            raise RunFailedError(f"After kill -9 these processes are left: {left}.", next_step="End them by hand.")


class Job:
    """One command in a run folder; every start goes on where the last one ended."""

    def __init__(self, command: Sequence[str], run: Path, log: Path, deadline: float = math.inf) -> None:
        """No wait outlasts `deadline`, a moment of `time.monotonic`."""
        self.command, self.run, self.log, self.deadline = list(command), run, log, deadline

    @contextmanager
    def running(self) -> Iterator[RunningJob]:
        """Start it; what still runs at the end is killed whole."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            process = subprocess.Popen(self.command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        running = RunningJob(self, process)
        try:
            yield running
        finally:
            if not running.ended:
                running.kill()

    def to_end(self) -> float:
        """Run it to its end; seconds from the start to the first new step. Raises `RunFailedError`."""
        with self.running() as running:
            first_s = running.first_step_s()
            running.end()
        return first_s

    def killed_after(self, step: int) -> float:
        """Run it, then kill -9 its whole process tree after `step` steps; seconds to the first new step.

        Raises `RunFailedError` when it ends before.
        """
        with self.running() as running:
            first_s = running.first_step_s()
            running.until(lambda: len(read_steps(self.run)) >= step)
            running.kill()
        return first_s

    def parity_means(self) -> list[float]:
        """Mean absolute difference of log-probabilities that each start so far has printed."""
        return [float(found[2]) for found in _PARITY.finditer(self.log.read_text())]

    def failed(self, what: str) -> RunFailedError:
        """The error that says so, with the last lines of the log."""
        last = "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
        return RunFailedError(
            f"{' '.join(self.command[2:4])} {what}. Last lines:\n{last}",
            next_step=f"Look at {self.log} and {self.run / 'logs'}.",
        )


def steady(steps: Sequence[dict[str, Any]], skip: int = 2) -> list[dict[str, Any]]:
    """Records without the first steps, which pay for a cold start, and the last, which publishes nothing."""
    return list(steps[skip:-1]) or list(steps)


def train_words() -> list[str]:
    return [sys.executable, "-m", "vime", "train"]


def num_gpus() -> int:
    return visible_gpus()


def refuse_one_gpu(gpus: int) -> None:
    """Raise `SettingsError` for a single GPU, where ranks and engines need one each."""
    if gpus == 1:
        raise SettingsError(
            "Ranks and engines need a GPU each, found 1, allowed: 2 or more, or none.",
            next_step="Hide it with CUDA_VISIBLE_DEVICES= to run on the CPU.",
        )


def without_folder(argv: Sequence[str] | None) -> list[str]:
    """Words of the command line, without the folder of this machine, for a report."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "--folder" in words:
        at = words.index("--folder")
        del words[at : at + 2]
    return words


def describe_devices() -> dict[str, str]:
    """What a report's machine has beyond processor and memory."""
    gpu = {"gpu": torch.cuda.get_device_name(0)} if num_gpus() else {}
    return gpu | {"devices": device_words(num_gpus())}
