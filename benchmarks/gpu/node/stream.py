"""The stream of two and four trainers with as many engines, over one of each, over its ceilings, and over memory."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.gpu import stream
from benchmarks.gpu.jobs import refuse_one_gpu, steady
from benchmarks.gpu.node.fleet import running_fleet
from benchmarks.gpu.node.jobs import job_command, on_standins, scaled
from benchmarks.gpu.part import Part, Stages, run_part
from benchmarks.gpu.stream import generation_rate, prepare, summarize
from vime.cli.demo_report import read_steps

DESCRIPTION = """\
Trains the job of `python -m benchmarks.gpu.stream` with SIZE trainers (data parallel, with the distributed optimizer)
and SIZE engines, each with as much to do as one of either has: SIZE is 1, 2 and 4 with eight GPUs, 1 and 2 with four, 1
with two. Without GPUs all three in small, with ranks over gloo and stand-in engines: what that tells of scaling is that
it runs.

  atSIZE_stream_tokens_per_s         response tokens trained in a second, over all steady steps
  atSIZE_generation_tokens_per_s     of the engines alone, all at once
  atSIZE_training_tokens_per_s       in a second of training itself, median over the steps of the turns
  atSIZE_turns_tokens_per_s          with --max-staleness 0: generation and training in turn
  atSIZE_stream_over_slower          stream / min(generation, training)
  atSIZE_...                         the other values of that part
  scaling_SIZE                       stream / (SIZE times that of one trainer and one engine); floor 0.85, goal 0.95
  straw_step_s, memory_step_s        seconds of a step at the largest SIZE, with the queue on disk and in memory; means
  straw_over_memory                  goal 1.03 or less
"""
SMALL = dataclasses.replace(stream.SMALL, groups=4, steps=5)
VARIANTS: Mapping[str, Mapping[str, object]] = {
    "stream": {},
    "turns": {"--max-staleness": 0},
    "memory": {"--rollout-data-transport": "object-store"},
}


def sizes_of(gpus: int) -> tuple[int, ...]:
    """Numbers of trainers, with as many engines; raises `SettingsError` for a single GPU."""
    refuse_one_gpu(gpus)
    return tuple(size for size in (1, 2, 4) if not gpus or 2 * size <= gpus)


def variant_command(stages: Stages, variant: str, size: int) -> list[str]:
    """The job of a size, as a stream, with both sides in turn, or with its samples in memory."""
    load = scaled(SMALL if stages.small else stream.FULL, size)
    run = stages.folder / f"{variant}_{size}"
    flags = VARIANTS[variant]
    command = job_command(stages.folder, run, load, stages.gpus, size, flags, "--use-distributed-optimizer")
    return command if stages.gpus else on_standins(command)


def generation(stages: Stages, size: int) -> dict[str, float]:
    """Tokens/s of all engines at once, which have nothing else to do."""
    load = SMALL if stages.small else stream.FULL
    num_requests = 2 * load.groups * load.group

    async def rates(addresses: Sequence[str]) -> list[float]:
        return await asyncio.gather(*(generation_rate(address, load, num_requests) for address in addresses))

    with running_fleet(stages.folder / "model", size, 1, stages.gpus, 0) as engines:
        return {"tokens_per_s": sum(asyncio.run(rates(engines.addresses)))}


def steps_of(stages: Stages, variant: str, size: int) -> dict[str, float]:
    """Train a job for its steps; how many it has."""
    job = stages.job(f"{variant}_{size}", variant_command(stages, variant, size))
    wanted = (SMALL if stages.small else stream.FULL).steps
    if len(read_steps(job.run)) < wanted:
        # What is measured is the steps; a commit of the whole model would only take time.
        job.killed_after(wanted)
    return {"steps": len(read_steps(job.run))}


def measure(stages: Stages) -> dict[str, float]:
    """Every value."""
    prepare(stages.folder, SMALL if stages.small else stream.FULL)
    sizes = sizes_of(stages.gpus)
    found: dict[str, float] = {}
    for size in sizes:
        alone = stages.once(f"alone_{size}", partial(generation, stages, size), needs_s=90)
        for variant in ("stream", "turns"):
            stages.once(f"{variant}_{size}", partial(steps_of, stages, variant, size), needs_s=150)
        streaming, turns = (_records(stages, variant, size) for variant in ("stream", "turns"))
        values = summarize(streaming, turns, alone["tokens_per_s"])
        found |= {f"at{size}_{name}": value for name, value in values.items()}
    largest = sizes[-1]
    stages.once(f"memory_{largest}", partial(steps_of, stages, "memory", largest), needs_s=150)
    straw, memory = (_step_s(stages, variant, largest) for variant in ("stream", "memory"))
    return (
        found
        | scaling(found, sizes)
        | {
            "straw_step_s": straw,
            "memory_step_s": memory,
            "straw_over_memory": straw / memory,
        }
    )


def scaling(found: Mapping[str, float], sizes: Sequence[int]) -> dict[str, float]:
    """Efficiency of each size: its tokens/s over as many times those of the smallest."""
    smallest, *larger = sizes
    one = found[f"at{smallest}_stream_tokens_per_s"] / smallest
    return {f"scaling_{size}": found[f"at{size}_stream_tokens_per_s"] / (size * one) for size in larger}


def _records(stages: Stages, variant: str, size: int) -> list[dict[str, Any]]:
    return list(read_steps(stages.folder / f"{variant}_{size}").values())


def _step_s(stages: Stages, variant: str, size: int) -> float:
    return statistics.fmean(record["step_s"] for record in steady(_records(stages, variant, size)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    packages = ("vllm", "torch", "megatron-core", "ray", "straw-queue")
    return run_part(Part("node.stream", DESCRIPTION, measure, packages), argv)


if __name__ == "__main__":
    raise SystemExit(main())
