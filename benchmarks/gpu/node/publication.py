"""Publications of a sharded trainer into several engines behind a router, and what the loss of an engine costs."""

from __future__ import annotations

import asyncio
import collections
import re
import shutil
import statistics
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.gpu.engines import model_in
from benchmarks.gpu.jobs import refuse_one_gpu
from benchmarks.gpu.node.fleet import running_fleet
from benchmarks.gpu.node.routed import RoutedFleet, behind_router
from benchmarks.gpu.node.sharded import ShardedTrainer
from benchmarks.gpu.part import Part, Stages, run_part
from benchmarks.gpu.plain_copy import plain_seconds

DESCRIPTION = """\
Publishes the weights of a trainer with tensor-parallel ranks into engines behind vllm-router, which have requests in
flight. FLEET is 2x1, 4x1, 2x2 or 1x2: engines, and GPUs of each. On GPUs Qwen3-0.6B in bf16 over NCCL: with eight the
first three fleets, with four 2x1 and 1x2, with two one engine (1x1) and a trainer of one rank. Without GPUs a tiny
model and stand-in engines over gloo.

  FLEET_bytes, FLEET_pause_s, FLEET_prepare_s
                        of a publication: sent, standing still, and before that with sampling going on; medians
  FLEET_plain_s         the same bytes by one plain broadcast to as many GPUs (or processes)
  FLEET_pause_over_plain    that is pause over bytes/bandwidth; floor 2.0, goal 1.25

An engine is then killed in the moment in which it is to load weights, and comes back later:

  loss_usual_s          seconds of a publication before that
  loss_s                from the beginning of the publication until the others serve a new version
  loss_publications     publications that it took; 1 is best
  loss_aborted          requests that lost their engine, and were asked again; one that fails ends the part
  loss_return_s         from the answering of its new process until it serves again
  hash_moved_share      groups of the other engines that the router sends elsewhere after the loss; 0 is right
  hash_back_share       groups that are where they were after the return; 1 is right
  hash_spread           groups of the fullest engine over an even share
"""
PUBLICATIONS = 3
"""Of each fleet, after two that aren't counted."""
NUM_GROUPS, SMALL_NUM_GROUPS = 256, 64
VICTIM = 1
_FLEET = re.compile(r"(\d)x(\d)")


def size_of(fleet: str) -> tuple[int, int]:
    """Engines, and workers of each."""
    found = _FLEET.fullmatch(fleet)
    assert found is not None
    return int(found[1]), int(found[2])


def fleets_of(gpus: int) -> tuple[str, ...]:
    """What there is room for beside a trainer of two ranks; raises `SettingsError` for a single GPU."""
    refuse_one_gpu(gpus)
    if gpus in (2, 3):
        return ("1x1",)
    return ("2x1", "1x2") if 4 <= gpus < 6 else ("2x1", "4x1", "2x2")


def ranks_of(gpus: int) -> int:
    """Of the trainer."""
    return 1 if gpus in (2, 3) else 2


def with_fleet(
    stages: Stages, fleet: str, use: Callable[[RoutedFleet], Coroutine[Any, Any, dict[str, float]]]
) -> dict[str, float]:
    """What `use` finds with such a fleet, a router and a trainer that are there for it alone."""
    model = model_in(stages.folder / "model", small=stages.small)
    run, gpus = stages.folder / f"run_{fleet}", stages.gpus
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)

    async def routed() -> dict[str, float]:
        async with behind_router(engines, trainer, run, gpus) as behind:
            return await use(behind)

    num_ranks = ranks_of(gpus)
    with (
        ShardedTrainer(model, num_ranks, gpus, run) as trainer,
        running_fleet(model, *size_of(fleet), gpus, num_ranks) as engines,
    ):
        return asyncio.run(routed())


def load_of(stages: Stages, num_engines: int) -> tuple[int, int]:
    """Requests at once, and tokens of each."""
    return (8 * num_engines, 64) if stages.small else (128 * num_engines, 512)


async def pauses(stages: Stages, fleet: str, behind: RoutedFleet) -> dict[str, float]:
    """Publications under load."""
    async with behind.traffic(*load_of(stages, len(behind.addresses))) as traffic:
        await behind.published()
        made = [await behind.published() for _ in range(PUBLICATIONS)]
        traffic.check()
    return {
        f"{fleet}_bytes": statistics.median(each.wire_bytes for each in made),
        f"{fleet}_pause_s": statistics.median(each.pause_s for each in made),
        f"{fleet}_prepare_s": statistics.median(each.prepare_s for each in made),
    }


async def loss(stages: Stages, behind: RoutedFleet) -> dict[str, float]:
    """An engine that is killed in a publication, and comes back."""
    num_groups = SMALL_NUM_GROUPS if stages.small else NUM_GROUPS
    before = await behind.places(num_groups)
    async with behind.traffic(*load_of(stages, len(behind.addresses))) as traffic:
        usual = await behind.published()
        made, seconds = await behind.kill_and_publish(VICTIM)
        await behind.groups.all_end()
        traffic.check()
    without = await behind.places(num_groups)
    return_s = await behind.return_s(VICTIM)
    after = await behind.places(num_groups)
    return {
        "loss_usual_s": usual.prepare_s + usual.pause_s,
        "loss_s": seconds,
        "loss_publications": len(made),
        "loss_aborted": behind.groups.num_aborted,
        "loss_return_s": return_s,
    } | hashing(before, without, after, behind.addresses[VICTIM], len(behind.addresses))


def hashing(
    before: Sequence[str], without: Sequence[str], after: Sequence[str], lost: str, num_engines: int
) -> dict[str, float]:
    """How steady and how even the engines of groups are: with all engines, without one that is lost, and again."""
    stayed = [first == second for first, second in zip(before, without, strict=True) if first != lost]
    back = [first == last for first, last in zip(before, after, strict=True)]
    fullest = max(collections.Counter(before).values())
    return {
        "hash_moved_share": 1 - statistics.fmean(stayed),
        "hash_back_share": statistics.fmean(back),
        "hash_spread": fullest * num_engines / len(before),
    }


def plain(stages: Stages, fleet: str, found: Mapping[str, float]) -> dict[str, float]:
    """A plain broadcast of as many bytes to as many workers."""
    engines, workers = size_of(fleet)
    seconds = plain_seconds(int(found[f"{fleet}_bytes"]), stages.gpus, stages.folder, engines * workers)
    return {f"{fleet}_plain_s": seconds}


def measure(stages: Stages) -> dict[str, float]:
    """Every value."""
    found: dict[str, float] = {}
    fleets = fleets_of(stages.gpus)
    for fleet in fleets:
        use = partial(pauses, stages, fleet)
        found |= stages.once(fleet, partial(with_fleet, stages, fleet, use), needs_s=180)
        found |= stages.once(f"plain_{fleet}", partial(plain, stages, fleet, found), needs_s=60)
        found[f"{fleet}_pause_over_plain"] = found[f"{fleet}_pause_s"] / found[f"{fleet}_plain_s"]
    largest = max(fleets, key=size_of)
    if size_of(largest)[0] > 1:
        found |= stages.once("loss", partial(with_fleet, stages, largest, partial(loss, stages)), needs_s=300)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    return run_part(Part("node.publication", DESCRIPTION, measure, ("vllm", "torch", "megatron-core")), argv)


if __name__ == "__main__":
    raise SystemExit(main())
