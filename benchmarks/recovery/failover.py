"""How long a stream stands still when its coordinator's process is killed."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from benchmarks.chaos.kills import Victim
from benchmarks.chaos.processes import kill_all
from benchmarks.recovery.restart import StartedJob, job_in, started

WAITING_BATCHES = 2
"""So many may have been accepted before the kill; the step after them needs the successor's acceptances."""
PAUSE_STEPS = 5
"""Between two kills."""


def failover_gaps(folder: Path, *, repeats: int) -> dict[str, list[float]]:
    """Kill the coordinator of one running job again and again.

    A gap is the time from the kill to the end of the first step whose groups no predecessor can have accepted, less
    what so many steps took right before the kill. It holds the restart of the process, the recovery of the queue, and
    how soon producers and driver reach it again.
    """
    prepared = job_in(folder / "failover", standin=True)
    prepared.folder.mkdir()
    prepared.prepare()
    gaps, steps = [], []
    with started(replace(prepared), standin=True) as session:
        session.wait_for_steps(PAUSE_STEPS)
        for _ in range(repeats):
            taken = _duration(session, WAITING_BATCHES + 1)
            _kill_coordinator(session)
            gaps.append(_duration(session, WAITING_BATCHES + 1) - taken)
            steps.append(taken)
            session.wait_for_steps(session.num_steps() + PAUSE_STEPS)
    return {"failover_gap_s": gaps, "failover_steps_before_s": steps}


def _duration(session: StartedJob, count: int) -> float:
    """Seconds that the next so many steps take."""
    begun = time.monotonic()
    session.wait_for_steps(session.num_steps() + count)
    return time.monotonic() - begun


def _kill_coordinator(session: StartedJob) -> None:
    if kill_all(session.marked.of_role(Victim.COORDINATOR)) != 1:
        raise RuntimeError("expected one coordinator")
