"""Whole jobs on stand-in engines, and commands of vime on what they leave."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.end_to_end.jobs import REPOSITORY, Job


def run_standin(job: Job, *, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
    """Run a job to its end; every process but the engines is real."""
    return _run(job.standin_command(), REPOSITORY, timeout_s)


def vime(*words: object, path: Path = REPOSITORY, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a command of vime; modules are imported from `path` first."""
    return _run([sys.executable, "-m", "vime", *map(str, words)], path, timeout_s)


def _run(argv: list[str], path: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys([str(path), str(REPOSITORY)]))}
    return subprocess.run(
        argv, env=environment, capture_output=True, text=True, timeout=timeout_s, cwd=REPOSITORY, check=False
    )
