"""A real `vime train` on a tiny model, for the end-to-end tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from storage.columns import decode_group
from storage.pool import Pool
from storage.positions import PositionRanges
from storage.queue import GroupQueue
from tests.support.tiny_models import build_tiny_qwen3
from vime.utils.types import Sample

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Job:
    """One run folder, the flags of its job (one that is None is left out), and flags without a value."""

    folder: Path
    num_rollout: int = 3
    flags: dict[str, Any] = field(default_factory=dict)
    switches: tuple[str, ...] = ()

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def prepare(self) -> None:
        """Model with random weights, and prompts."""
        build_tiny_qwen3(self.model, seed=0)
        lines = [json.dumps({"input": f"r{number:05d}=", "label": f"{number:05d}"[::-1]}) for number in range(64)]
        (self.folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")

    def command(self) -> list[str]:
        flags = {
            "--hf-checkpoint": self.model,
            "--prompt-data": self.folder / "prompts.jsonl",
            "--label-key": "label",
            "--custom-rm-path": "tests.end_to_end.rewards.digits",
            "--num-rollout": self.num_rollout,
            "--rollout-batch-size": 8,
            "--n-samples-per-prompt": 4,
            "--rollout-max-response-len": 16,
            "--lr": 1e-3,
            "--max-tokens-per-gpu": 512,
            "--actor-num-gpus-per-node": 1,
            "--flush-cache-interval": 0,
            "--rollout-data-transport": "straw",
            "--save": self.run,
            "--save-interval": 1,
            "--vllm-max-model-len": 64,
            **self.flags,
        }
        always = ["--use-rollout-logprobs", "--calculate-per-token-loss", "--use-dynamic-batch-size"]
        words = [word for name, value in flags.items() if value is not None for word in (name, str(value))]
        return [sys.executable, "-m", "vime", "train", *words, *always, *self.switches]

    def standin_command(self) -> list[str]:
        """The same job on stand-in engines; every other process is real."""
        return self.command_of("tests.end_to_end.standin_run")

    def command_of(self, module: str) -> list[str]:
        """The same job by a module of the tests in the place of `vime train`."""
        words = self.command()
        return [sys.executable, "-m", module, *words[words.index("train") + 1 :]]

    def start(self) -> subprocess.Popen[str]:
        """Start the job in a process group of its own."""
        return self.started(self.command())

    def start_with_standins(self) -> subprocess.Popen[str]:
        """Start `standin_command` in a process group of its own."""
        return self.started(self.standin_command())

    @staticmethod
    def started(command: list[str]) -> subprocess.Popen[str]:
        """Start a command in a process group of its own."""
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def steps(self) -> list[dict[str, Any]]:
        """Lines of rollout batches."""
        path = self.run / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if "evaluation" not in line]

    def processes(self) -> dict[str, Any]:
        ids: dict[str, Any] = json.loads((self.run / "processes.json").read_text())
        return ids


def run_with_standins(job: Job, **variables: str) -> str:
    """Output of a finished run whose engines are stand-ins; fails with it when the run fails.

    `variables` are added to its environment.
    """
    done = ended_with_standins(job, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ended_with_standins(job: Job, **variables: str) -> subprocess.CompletedProcess[str]:
    """A run whose engines are stand-ins, however it ended."""
    return subprocess.run(
        job.standin_command(),
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=280,
        cwd=REPOSITORY,
        check=False,
    )


def stored_samples(job: Job) -> list[Sample]:
    """Every sample that the queue accepted; the job must have ended."""
    with Pool.open(job.run / "rollout_data" / "pool") as pool:
        with GroupQueue.open(pool, owner="test", lease_seconds=60) as queue:
            queue.reopen(PositionRanges())
            accepted = queue.accepted()
        return [s for group in accepted for s in decode_group(*vars(pool.read_group(group.ref)).values())]


def wait_until(condition: Callable[[], bool], job: subprocess.Popen[str], timeout_s: float = 240.0) -> None:
    """Wait for a condition while the job runs; fails with its output when it ends first."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if job.poll() is not None:
            raise AssertionError(f"the job ended with {job.returncode}:\n{job.communicate()[0]}")
        if time.monotonic() > deadline:
            job.kill()
            raise AssertionError(f"no progress in {timeout_s} s:\n{job.communicate()[0]}")
        time.sleep(0.05)


def tree(pid: int) -> list[psutil.Process]:
    """A process and everything below it."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def survivors(processes: list[psutil.Process], timeout_s: float = 15.0) -> list[str]:
    """Those that outlive the timeout."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return [f"{process.pid} {process.cmdline()[:4]}" for process in alive]


def shared_memory() -> set[str]:
    """Names of the segments and semaphores that Python and torch made on this machine."""
    made = ("psm_", "sem.", "torch_")
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(made)}


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
