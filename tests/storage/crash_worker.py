"""The process that dies: `python crash_worker.py SCENARIO ROOT KILL_AT` kills itself at that I/O phase of a change."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from queue_helpers import publish, samples_of, submit

from storage.pool import Pool
from storage.queue import GroupQueue
from storage.refs import ref_to_bytes
from storage.summary import summarize


class Bomb:
    """Fault hook: counts I/O phases once armed and kills the process with SIGKILL at the given one."""

    def __init__(self, kill_at: int) -> None:
        self.kill_at = kill_at
        self.armed = False
        self.num_phases = 0

    def __call__(self, _phase: str) -> None:
        if self.armed:
            if self.num_phases == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.num_phases += 1


def main(scenario: str, root: Path, bomb: Bomb) -> None:
    bomb.armed = scenario == "create"
    pool = Pool.create(root, "run", fault=bomb) if scenario == "create" else Pool.open(root, fault=bomb)
    bomb.armed = scenario in ("create", "recover")
    queue = GroupQueue.open(pool, owner="victim", lease_seconds=60)
    if scenario in ("create", "recover"):
        return
    if scenario == "submit":
        bomb.armed = True
        submit(queue, 3, 5)
        return
    leased = queue.lease("w", 1)[0]
    bomb.armed = scenario == "publish"
    ref = publish(pool, leased)
    (root / "lease").write_bytes(leased.lease)
    (root / "ref").write_bytes(ref_to_bytes(ref))
    bomb.armed = True
    if scenario == "accept":
        queue.accept(leased.lease, ref, summarize(samples_of(1)))
        (root / "acknowledged").touch()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Bomb(int(sys.argv[3])))
