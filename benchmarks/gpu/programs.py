"""Benchmarks that are parts of the suite as they are: run as programs, read by the line that they print last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks.gpu.jobs import REPOSITORY
from benchmarks.gpu.part import Stages
from vime.errors import RunFailedError


def medians_of(module: str, words: Sequence[str], stages: Stages) -> dict[str, float]:
    """The median of each value that `python -m module` reports. Raises `RunFailedError` when it fails."""
    left_s = min(stages.deadline - time.monotonic(), 3600.0)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", module, *words, "--json"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=left_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise RunFailedError(f"{module} took longer than {left_s:.0f} s.", next_step="Give it more time.") from error
    if done.returncode:
        raise RunFailedError(
            f"{module} ended with status {done.returncode}:\n{done.stderr[-2000:]}", next_step=f"Run {module} alone."
        )
    return {name: value["median"] for name, value in json.loads(done.stdout.splitlines()[-1])["values"].items()}
