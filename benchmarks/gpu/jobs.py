"""Jobs of `vime train` on whatever devices there are, as the benchmarks start, kill and read them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from pipeline.devices import visible_gpus
from vime.cli.demo_report import read_steps
from vime.errors import RunFailedError

REPOSITORY = Path(__file__).resolve().parents[2]
HEAD = '{"head_dtype": "float32"}'
"""`--hf-overrides` that let the engine multiply the output head in float32, as the trainer does."""
ONE_GPU_SHARE = 0.35
"""Part of a GPU's memory that the engine takes where the trainer has to live on the same one."""
_PARITY = re.compile(r"against the trainer on (\d+) tokens: mean ([\d.e+-]+), p99 ([\d.e+-]+), max ([\d.e+-]+?)[.;]")


def device_flags(num_gpus: int) -> list[str]:
    """Placement and precision: trainer and engine get a GPU each, share one, or are processes of the CPU."""
    if num_gpus == 0:
        return []
    flags = ["--bf16", "--vllm-dtype", "bfloat16", "--vllm-hf-overrides", HEAD]
    if num_gpus == 1:
        flags += ["--colocate", "--no-offload-train", "--no-offload-rollout", "--flush-cache-interval", "1"]
        flags += ["--vllm-gpu-memory-utilization", str(ONE_GPU_SHARE)]
    return flags


def device_words(num_gpus: int) -> str:
    """The same for people."""
    return {0: "processes of the CPU", 1: "trainer and engine on one GPU"}.get(num_gpus, "a GPU each")


class Job:
    """One command in a run folder; every start goes on where the last one ended."""

    def __init__(self, command: Sequence[str], run: Path, log: Path) -> None:
        self.command, self.run, self.log = list(command), run, log

    def to_end(self) -> float:
        """Run it to its end; seconds from the start to the first new step. Raises `RunFailedError`."""
        known = self._marks()
        with self._started() as process:
            first_s = self._until(lambda: self._marks() != known, process)
            process.wait()
        self._check(process.returncode)
        return first_s

    def killed_after(self, step: int) -> float:
        """Run it, then kill -9 its whole process tree after `step` steps; seconds to the first new step.

        Raises `RunFailedError` when it ends before.
        """
        known = self._marks()
        with self._started() as process:
            first_s = self._until(lambda: self._marks() != known, process)
            self._until(lambda: len(read_steps(self.run)) >= step, process)
            tree = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
            for each in tree:
                try:
                    each.send_signal(signal.SIGKILL)
                except psutil.NoSuchProcess:
                    continue
            process.wait()
        _, left = psutil.wait_procs(tree, timeout=15.0)
        if left:
            raise RunFailedError(f"After kill -9 these processes are left: {left}.", next_step="End them by hand.")
        return first_s

    def parity_means(self) -> list[float]:
        """Mean absolute difference of log-probabilities that each start so far has printed."""
        return [float(found[2]) for found in _PARITY.finditer(self.log.read_text())]

    def _started(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            return subprocess.Popen(self.command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def _marks(self) -> tuple[int, float]:
        """What changes with every step, also when a resume trains an old one anew."""
        path = self.run / "metrics.jsonl"
        return (path.stat().st_size, path.stat().st_mtime) if path.exists() else (0, 0.0)

    def _until(self, condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> float:
        started = time.monotonic()
        while not condition():
            if process.poll() is not None:
                if condition():
                    break
                self._check(process.returncode, early=True)
            time.sleep(0.02)
        return time.monotonic() - started

    def _check(self, status: int | None, *, early: bool = False) -> None:
        if status or early:
            last = "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
            raise RunFailedError(
                f"{' '.join(self.command[2:4])} ended with status {status}. Last lines:\n{last}",
                next_step=f"Look at {self.log} and {self.run / 'logs'}.",
            )


def steady(steps: Sequence[dict[str, Any]], skip: int = 2) -> list[dict[str, Any]]:
    """Records without the first steps, which pay for a cold start, and the last, which publishes nothing."""
    return list(steps[skip:-1]) or list(steps)


def train_words() -> list[str]:
    return [sys.executable, "-m", "vime", "train"]


def num_gpus() -> int:
    return visible_gpus()


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
