"""A job in small, for the campaign's own tests: python -m tests.benchmarks.kill_rehearsal RUN HOW.

It takes steps until SIGINT, and passes a kill point in each. HOW: "well"; "orphan": a process stays when it ends;
"frozen": after a kill of its child it stands still; "short": it ends by itself before its first step.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from vime.utils.kill_points import KillPoint, reach

SLEEP = ["sleep", "60"]


def main(run: Path, how: str) -> int:
    if how == "short":
        return 3
    signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
    run.mkdir(parents=True, exist_ok=True)
    if how == "orphan":
        subprocess.Popen(SLEEP, start_new_session=True)
    ends_with_its_parent = "import sys; sys.stdin.read()"
    worker = subprocess.Popen([sys.executable, "-c", ends_with_its_parent, "ray::TrainerActor"], stdin=subprocess.PIPE)
    try:
        for number in range(10_000):
            while how == "frozen" and worker.poll() is not None:
                time.sleep(0.02)
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"rollout_id": number, "policy_version": number}) + "\n")
            reach(KillPoint.BEFORE_COMMIT)
            time.sleep(0.02)
    finally:
        worker.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
