"""Parallel layouts on two ranks in bf16 against one rank in fp32, and what replayed routes add to that."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.gpu.jobs import refuse_one_gpu
from benchmarks.gpu.part import Part, Stages, run_part
from benchmarks.gpu.programs import medians_of
from tests.support.worlds import RankFailedError, run_scenarios
from vime.errors import RunFailedError

DESCRIPTION = """\
Takes two optimizer steps on the same batches in each layout on two ranks in bf16, and on one rank in fp32, with tiny
models whose logits differ enough; then compares log-probabilities and metrics. LAYOUT is one of

  tensor, pipeline, zigzag        each cut in two: tensor, pipeline, context parallel
  distributed                     data parallel with the distributed optimizer
  experts, experts_distributed    a mixture of experts, spread over both ranks; the same with the distributed optimizer

  LAYOUT_log_probs    largest difference of a token's log-probability after the steps, of all objectives tried
  LAYOUT_metrics      largest difference of a metric, relative above 1
  LAYOUT_moved        how far the steps moved a weight: 0 would say that nothing was compared
  max_gap, k3_gap, max_gap_replayed, k3_gap_replayed, max_gap_cut, k3_gap_cut
                      trainer against a bf16 sampler of a mixture of experts, without and with its routes, as
                      `python -m benchmarks.routing_replay` measures them
"""
LAYOUTS = ("tensor", "pipeline", "zigzag", "distributed", "experts", "experts_distributed")
REPLAY_VALUES = ("max_gap", "k3_gap", "max_gap_replayed", "k3_gap_replayed", "max_gap_cut", "k3_gap_cut")
WORLD = 2


def layout_distances(stages: Stages, layout: str) -> dict[str, float]:
    """The largest of each distance over the kinds of batches that the layout is tried with."""
    name = f"bf16_{layout}"
    found = in_world(stages, layout, WORLD, [name])[name]
    return {f"{layout}_{value}": largest(found, value) for value in ("log_probs", "metrics", "moved")}


def in_world(
    stages: Stages, name: str, world: int, scenarios: Sequence[str], worker: str = "layout_worker.py"
) -> dict[str, Any]:
    """What a world of ranks finds in each scenario, in a new folder of that name. Raises `RunFailedError`."""
    folder = stages.folder / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    left_s = min(stages.deadline - time.monotonic(), 3600.0)
    try:
        return run_scenarios(folder, world, scenarios, worker, left_s)
    except (RankFailedError, subprocess.TimeoutExpired) as error:
        raise RunFailedError(f"{name}: {error}", next_step=f"Look at the logs in {folder}.") from error


def largest(kinds: Mapping[str, Mapping[str, Any]], value: str) -> float:
    """Of all kinds of batches."""
    return max(float(found[value]) for found in kinds.values())


def measure(stages: Stages) -> dict[str, float]:
    """Every value."""
    refuse_one_gpu(stages.gpus)
    found: dict[str, float] = {}
    for layout in filter(stages.wants, LAYOUTS):
        found |= stages.once(layout, partial(layout_distances, stages, layout), needs_s=35)
    if stages.wants("replay"):
        quick = ["--quick"] if stages.small else []
        replay = stages.once("replay", lambda: medians_of("benchmarks.routing_replay", quick, stages), needs_s=60)
        found |= {name: replay[name] for name in REPLAY_VALUES}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    return run_part(Part("layouts", DESCRIPTION, measure, ("torch", "megatron-core"), (*LAYOUTS, "replay")), argv)


if __name__ == "__main__":
    raise SystemExit(main())
