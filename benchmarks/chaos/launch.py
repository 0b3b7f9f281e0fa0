"""Start a job's process so that it, and all that comes from it, can be found and ended."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from benchmarks.chaos.processes import MARK_VARIABLE
from tests.end_to_end.jobs import REPOSITORY, Job


def launch(job: Job, log: Path, mark: str, *, standin: bool, **variables: str) -> subprocess.Popen[bytes]:
    """The driver, in a process group of its own, with `variables` in its environment; it writes to `log`."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        MARK_VARIABLE: mark,
        **variables,
    }
    with log.open("wb") as output:
        return subprocess.Popen(
            job.standin_command() if standin else job.command(),
            env=environment,
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
