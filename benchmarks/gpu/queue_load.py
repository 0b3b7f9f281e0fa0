"""The stream of `benchmarks.gpu.stream` with its persistent queue, and with samples in memory."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.gpu import stream
from benchmarks.gpu.jobs import steady
from benchmarks.gpu.part import Part, Stages, run_part
from vime.cli.demo_report import read_steps

DESCRIPTION = """\
Trains the job of `python -m benchmarks.gpu.stream` twice: with --rollout-data-transport straw, whose queue is on disk
and survives every crash, and with object-store, whose samples are in memory.

  straw_step_s, memory_step_s        seconds of a step, mean of the steady steps: quick and slow ones follow
                                     each other where samples come in waves
  straw_wait_s, memory_wait_s        of them the trainer's wait for samples
  straw_over_memory                  step time; goal 1.03 or less
"""
SIDES: Mapping[str, tuple[str, ...]] = {
    "straw": (),
    "memory": ("--rollout-data-transport", "object-store"),
}


def side_command(folder: Path, side: str, load: stream.Load, gpus: int) -> list[str]:
    """The job with its samples on that side."""
    return [*stream.train_command(folder, folder / side, load, gpus), *SIDES[side]]


def step_times(stages: Stages, side: str, load: stream.Load) -> dict[str, float]:
    """Means of one job."""
    job = stages.job(side, side_command(stages.folder, side, load, stages.gpus))
    if len(read_steps(job.run)) < load.steps:
        job.killed_after(load.steps)
    records = steady(list(read_steps(job.run).values()))
    return {f"{side}_{name}": statistics.fmean(record[name] for record in records) for name in ("step_s", "wait_s")}


def measure(stages: Stages) -> dict[str, float]:
    """Every value."""
    load = stream.SMALL if stages.small else stream.FULL
    stream.prepare(stages.folder, load)
    found: dict[str, float] = {}
    for side in SIDES:
        found |= stages.once(side, partial(step_times, stages, side, load), needs_s=110)
    return found | {"straw_over_memory": found["straw_step_s"] / found["memory_step_s"]}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    return run_part(
        Part("queue_load", DESCRIPTION, measure, ("vllm", "torch", "megatron-core", "ray", "straw-queue")), argv
    )


if __name__ == "__main__":
    raise SystemExit(main())
