"""How soon a job trains again after kill -9 of its trainer, of its engine, and of all its processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Self

from benchmarks.chaos.kills import Victim
from benchmarks.gpu.jobs import Job, RunningJob
from benchmarks.gpu.part import Part, Stages, run_part
from benchmarks.gpu.reverse_job import prepare_example, reverse_command
from recovery.audit import audit_run

DESCRIPTION = """\
Trains the model of examples/reverse with samples of the present weights alone (so that no step can be trained from what
was generated before a kill), kills one role after another by SIGKILL, and waits for the next step. A job that ends by
the kill is started again at once by the same command; one that replaces what died goes on.

  cold_start_s                        from the command to the first step
  trainer_s, engine_s, tree_s         from the kill to the first new step
  trainer_over_cold, engine_over_cold, tree_over_cold
                                      the same over cold_start_s; floor 1.2
  restarts                            kills after which the command had to be given again
  lost, trained_twice                 groups, counted from the journal and the ranks' logs
"""
VICTIMS = (Victim.TRAINER, Victim.ENGINE, Victim.TREE)
STEPS_BEFORE = 5
"""That a start trains before the next kill: past a commit."""
SAVE_INTERVAL = 2
MORE_STEPS = {Victim.ENGINE: 2}
"""Steps to wait for after a kill, where it isn't one: the groups of the first may have been there already."""
FLAGS = ("--save-interval", str(SAVE_INTERVAL), "--max-staleness", "0", "--use-fault-tolerance")


class Crashes:
    """One job, started when it doesn't run."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._stack = ExitStack()
        self._running: RunningJob | None = None
        self.restarts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def cold_start(self) -> dict[str, float]:
        """Seconds to the first step."""
        return {"cold_start_s": self._present().first_step_s()}

    def kill_to_step(self, victim: Victim) -> dict[str, float]:
        """Kill it after some steps; seconds until there is a new one."""
        running = self._present()
        self._until_steps(running, running.num_steps() + STEPS_BEFORE)
        begun, restarts = time.monotonic(), 0
        running.kill(victim)
        steps = running.num_steps()
        wanted = MORE_STEPS.get(victim, 1)
        running.until(lambda: running.ended or running.num_steps() >= steps + wanted)
        if running.ended:
            restarts = 1
            self._until_steps(self._present(), wanted)
        return {f"{victim.value}_s": time.monotonic() - begun, f"{victim.value}_restarts": restarts}

    def _until_steps(self, running: RunningJob, steps: int) -> None:
        running.until(lambda: running.num_steps() >= steps)

    def _present(self) -> RunningJob:
        if self._running is None or self._running.ended:
            self._stack.close()
            self._running = self._stack.enter_context(self._job.running())
        return self._running


def measure(stages: Stages) -> dict[str, float]:
    """Every value."""
    prepare_example(stages.folder)
    job = stages.job("job", [*reverse_command(stages.folder, stages.folder / "job", 10_000, stages.gpus), *FLAGS])
    with Crashes(job) as crashes:
        found = stages.once("cold", crashes.cold_start, needs_s=80)
        for victim in VICTIMS:
            found |= stages.once(victim.value, partial(crashes.kill_to_step, victim), needs_s=100)
    report = audit_run(job.run)
    for victim in VICTIMS:
        found[f"{victim.value}_over_cold"] = found[f"{victim.value}_s"] / found["cold_start_s"]
    restarts = sum(found.pop(f"{victim.value}_restarts") for victim in VICTIMS)
    return found | {"restarts": restarts, "lost": len(report.lost), "trained_twice": len(report.trained_twice)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    return run_part(Part("crash", DESCRIPTION, measure), argv)


if __name__ == "__main__":
    raise SystemExit(main())
