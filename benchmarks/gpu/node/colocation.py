"""Four trainer ranks and their engines by turns in the same memory, and an actor with a critic that leave theirs."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.gpu import stream
from benchmarks.gpu.jobs import Job, refuse_one_gpu
from benchmarks.gpu.node.jobs import job_command, on_standins
from benchmarks.gpu.part import Part, Stages, run_part
from benchmarks.gpu.smokes import SLEPT, STEPS, job_values, value_loss
from benchmarks.gpu.stream import prepare
from vime.cli.demo_report import read_steps
from vime.errors import RunFailedError

DESCRIPTION = """\
Trains the model of `python -m benchmarks.gpu.stream` for STEPS rollout batches to the job's end and checks what it has
left, as `python -m benchmarks.gpu.smokes` does. JOB is one of

  engines    four ranks (2 x 2, tensor and data parallel, with the distributed optimizer) and four engines by turns on
             four GPUs: the trainer leaves the memory, engines sleep and wake
  engine     four tensor-parallel ranks and one engine of four workers, by turns
  ppo        two ranks with a critic that leave their GPUs while two engines on others generate

With two GPUs there are half as many of each. Without any, ranks are processes over gloo, and several engines are
stand-ins; the one engine is real.

  JOB_step_s, JOB_train_s, JOB_wait_s, JOB_publish_s
                                 medians of the batches; the third is the trainer's wait for groups
  JOB_lost, JOB_trained_twice    groups, counted from the journal and the ranks' logs
  JOB_parity_mean                trainer against engine at the start, mean absolute difference of log-probabilities
  engines_sleeps, engine_sleeps  of the engine that slept the fewest times; at least STEPS, but for a real one on a CPU,
                                 which has nothing to leave: 0
  engines_freed_gib, engine_freed_gib    that a worker gave back at a sleep, the least of them; 0 on a CPU
  ppo_value_loss                 of the last step
"""
TIMES = ("train_s", "wait_s", "publish_s")
GPU_SHARE = "0.35"
"""Part of a GPU's memory that an engine takes: more than this model needs, and soon given back."""


@dataclass(frozen=True)
class Layout:
    """How one job lies on the GPUs."""

    ranks: int
    """Of the trainer, on a machine with four GPUs."""
    tensor_size: int
    flags: Mapping[str, object]
    switches: tuple[str, ...]
    one_engine: bool = False
    """On all GPUs of the trainer, instead of one on each."""

    @property
    def is_colocated(self) -> bool:
        return "--colocate" in self.switches


BY_TURNS: Mapping[str, object] = {"--flush-cache-interval": 1}
JOBS: Mapping[str, Layout] = {
    "engines": Layout(4, 2, BY_TURNS, ("--colocate", "--use-distributed-optimizer")),
    "engine": Layout(4, 4, BY_TURNS, ("--colocate",), one_engine=True),
    "ppo": Layout(2, 2, {"--advantage-estimator": "ppo", "--num-critic-only-steps": 1}, ("--offload-train",)),
}


def ranks_of(layout: Layout, gpus: int) -> int:
    """Of the trainer."""
    return layout.ranks // 2 if 2 <= gpus < 4 else layout.ranks


def turns_command(stages: Stages, name: str) -> list[str]:
    """The job."""
    layout, gpus = JOBS[name], stages.gpus
    ranks = ranks_of(layout, gpus)
    flags: dict[str, object] = {
        "--num-rollout": STEPS,
        "--save-interval": STEPS,
        "--tensor-model-parallel-size": max(1, layout.tensor_size * ranks // layout.ranks),
        **layout.flags,
    }
    if layout.one_engine:
        flags |= {"--rollout-num-gpus-per-engine": ranks} if gpus else {"--rollout-num-gpus": 1}
    if gpus:
        flags["--vllm-gpu-memory-utilization"] = GPU_SHARE
    load = stream.SMALL if stages.small else dataclasses.replace(stream.FULL, steps=STEPS)
    command = job_command(stages.folder, stages.folder / name, load, gpus, ranks, flags, *layout.switches)
    return command if gpus or layout.one_engine else on_standins(command)


def by_turns(stages: Stages, name: str) -> dict[str, float]:
    """Values of one job."""
    layout = JOBS[name]
    job = stages.job(name, turns_command(stages, name))
    found = job_values(job, name)
    records = list(read_steps(job.run).values())
    found |= {f"{name}_{time}": statistics.median(record[time] for record in records) for time in TIMES}
    if layout.is_colocated:
        is_real_on_cpu = layout.one_engine and not stages.gpus
        workers = ranks_of(layout, stages.gpus) if layout.one_engine and stages.gpus else 1
        return found | sleeps(job, name, workers, at_least=0 if is_real_on_cpu else STEPS)
    return found | {f"{name}_value_loss": value_loss(job)}


def sleeps(job: Job, name: str, workers: int, at_least: int) -> dict[str, float]:
    """How often each engine, of so many workers, has left its memory, and what a worker gave back, the least of both.

    Raises `RunFailedError` when an engine has slept less than `at_least` times.
    """
    logs = job.run / "logs"
    freed = [[float(gib) for gib in SLEPT.findall(log.read_text())] for log in sorted(logs.glob("engine_?.log"))]
    told = [log.read_text().split("\n").count("sleep") for log in sorted(logs.glob("engine_?_events.log"))]
    slept = told or [len(each) // workers for each in freed]
    if min(slept) < at_least:
        raise RunFailedError(
            f"{name}: engines slept {slept} times in {STEPS} batches.",
            next_step=f"Look at {logs}.",
        )
    least = min((gib for each in freed for gib in each), default=0.0)
    return {f"{name}_sleeps": min(slept), f"{name}_freed_gib": least}


def measure(stages: Stages) -> dict[str, float]:
    """Every value."""
    refuse_one_gpu(stages.gpus)
    prepare(stages.folder, stream.SMALL if stages.small else stream.FULL)
    found: dict[str, float] = {}
    for name in filter(stages.wants, JOBS):
        found |= stages.once(name, partial(by_turns, stages, name), needs_s=200)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    words = DESCRIPTION.replace("STEPS", str(STEPS))
    return run_part(Part("node.colocation", words, measure, choices=tuple(JOBS)), argv)


if __name__ == "__main__":
    raise SystemExit(main())
