"""How long the reverse task takes to nine right answers of ten, as a stream and synchronously."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from benchmarks.gpu.part import Part, Stages, run_part
from benchmarks.gpu.reverse_job import prepare_example, reverse_command
from benchmarks.gpu.reverse_run import GOAL, WINDOW, steps_to_goal
from vime.cli.demo_report import read_steps
from vime.errors import RunFailedError

DESCRIPTION = """\
Trains the model of examples/reverse until the mean exact reward of five steps is GOAL, twice: as a stream whose samples
are up to 4 policy versions old, and synchronously, with samples of the present weights alone. In small the goal is
SMALL, which the model reaches soon.

  async_steps, sync_steps          steps until then
  async_s, sync_s                  seconds of these steps, without the job's start
  async_staleness_max              age of the oldest sample that the stream trained, in policy versions
  async_over_sync                  seconds; below 1 the stream learns faster
"""
MOST_STEPS = 400
SMALL_GOAL = 0.25
"""A little under the reward of the model that the example begins with."""
SIDES: Mapping[str, tuple[str, ...]] = {"async": ("--max-staleness", "4"), "sync": ("--max-staleness", "0")}


def to_goal(stages: Stages, side: str) -> dict[str, float]:
    """Train one side to the goal; raises `RunFailedError` when it isn't reached in `MOST_STEPS` steps."""
    goal = SMALL_GOAL if stages.small else GOAL
    command = reverse_command(stages.folder, stages.folder / side, MOST_STEPS, stages.gpus)
    job = stages.job(side, [*command, *SIDES[side]])

    def steps() -> int:
        return steps_to_goal([record["reward_mean"] for record in read_steps(job.run).values()], goal)

    if not steps():
        with job.running() as running:
            running.until(lambda: running.ended or steps() > 0, poll_s=0.5)
            if running.ended:
                running.end()
    found = steps()
    if not found:
        raise RunFailedError(
            f"{side}: the mean reward of {WINDOW} steps was never {goal} in {len(read_steps(job.run))} steps.",
            next_step=f"Look at {job.log}.",
        )
    records = list(read_steps(job.run).values())[:found]
    values = {"steps": found, "s": sum(record["step_s"] for record in records)}
    values["staleness_max"] = max(record["staleness_max"] for record in records)
    return {f"{side}_{name}": value for name, value in values.items()}


def measure(stages: Stages) -> dict[str, float]:
    """Every value."""
    prepare_example(stages.folder)
    found: dict[str, float] = {}
    for side in filter(stages.wants, SIDES):
        found |= stages.once(side, partial(to_goal, stages, side), needs_s=130)
    if all(map(stages.wants, SIDES)):
        found["async_over_sync"] = found["async_s"] / found["sync_s"]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    words = DESCRIPTION.replace("GOAL", str(GOAL)).replace("SMALL", str(SMALL_GOAL))
    return run_part(Part("learning", words, measure, choices=tuple(SIDES)), argv)


if __name__ == "__main__":
    raise SystemExit(main())
