"""Start a job's process so that it, and all that comes from it, can be found and ended."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from benchmarks.chaos.processes import MARK_VARIABLE
from benchmarks.chaos.standing import Driver, Standing
from tests.end_to_end.jobs import REPOSITORY, Job


def launch(
    job: Job, log: Path, mark: str, *, standin: bool, standing: Standing | None = None, **variables: str
) -> Driver:
    """The driver, in a process group of its own, with `variables` in its environment; it writes to `log`.

    Where a fork server and a cluster stand, it comes from the one and joins the other.
    """
    command = job.standin_command() if standin else job.command()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        MARK_VARIABLE: mark,
        **variables,
    }
    if standing is not None:
        return standing.start(command, log, environment)
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env=environment,
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
        )
