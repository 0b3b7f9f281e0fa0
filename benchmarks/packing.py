"""How full and how even microbatches are, and how long packing takes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.report import benchmark_parser, build_report, parse_options, print_report
from pipeline.packing import Microbatches, PackingSettings, pack_step

DESCRIPTION = """\
Measures the packer on 10,000 sequence lengths from a log-normal distribution (median 3000, sigma 1, seed 0, at most
32768 tokens), with microbatches of at most 32768 tokens on 8 data-parallel ranks.

  fill                  tokens divided by the tokens that the microbatches could hold
  imbalance             most tokens of a rank divided by the mean over ranks
  seconds               processor time to pack
  work_imbalance        as imbalance, of estimated work, where that is what is balanced (--balance-by-flops)
  work_fill             fill of that plan
  unbalanced_fill, unbalanced_imbalance, unbalanced_seconds      the packer without --balance-data
  first_fit_fill, first_fit_imbalance, first_fit_seconds         first fit in order of arrival, dealt in turn

With --quick there are 1000 lengths.
"""
MAX_TOKENS = 32768
NUM_RANKS = 8
LINEAR_WORK = 12 * 4096
"""Of a model with hidden size 4096; see `vime.models.work`."""


def lengths_of(count: int) -> dict[int, int]:
    """The same ones at every call."""
    chance = random.Random(0)
    return {number: min(MAX_TOKENS, max(1, round(chance.lognormvariate(8.006, 1.0)))) for number in range(count)}


def first_fit(lengths: Mapping[int, int]) -> Microbatches:
    """Each sequence, in order of arrival, into the first microbatch that has room; microbatches dealt in turn."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for number, length in lengths.items():
        for index, room in enumerate(rooms):
            if length <= room:
                bins[index].append(number)
                rooms[index] -= length
                break
        else:
            bins.append([number])
            rooms.append(MAX_TOKENS - length)
    bins += [[] for _ in range(-len(bins) % NUM_RANKS)]
    return [bins[rank::NUM_RANKS] for rank in range(NUM_RANKS)]


def imbalance(plan: Microbatches, cost: Callable[[int], float]) -> float:
    """Greatest cost of a rank divided by the mean; `cost` of a sample number."""
    costs = [sum(cost(number) for members in rank for number in members) for rank in plan]
    return max(costs) * len(costs) / sum(costs)


def fill(plan: Microbatches, lengths: Mapping[int, int]) -> float:
    return sum(lengths.values()) / (MAX_TOKENS * sum(len(rank) for rank in plan))


def measure(lengths: Mapping[int, int]) -> dict[str, float]:
    """Every value, once."""
    even = PackingSettings(num_ranks=NUM_RANKS, max_tokens=MAX_TOKENS, balance=True)
    by_work = PackingSettings(num_ranks=NUM_RANKS, max_tokens=MAX_TOKENS, balance=True, linear_work=LINEAR_WORK)
    plain = PackingSettings(num_ranks=NUM_RANKS, max_tokens=MAX_TOKENS)
    packers: dict[str, Callable[[], Microbatches]] = {
        "": lambda: pack_step(lengths, even),
        "unbalanced_": lambda: pack_step(lengths, plain),
        "first_fit_": lambda: first_fit(lengths),
    }
    values: dict[str, float] = {}
    for name, pack in packers.items():
        started = time.process_time()
        plan = pack()
        values[f"{name}seconds"] = time.process_time() - started
        values[f"{name}fill"] = fill(plan, lengths)
        values[f"{name}imbalance"] = imbalance(plan, lambda number: lengths[number])
    plan = pack_step(lengths, by_work)
    values["work_imbalance"] = imbalance(plan, lambda number: by_work.work(lengths[number]))
    values["work_fill"] = fill(plan, lengths)
    return values


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    options = parse_options(benchmark_parser("packing", DESCRIPTION, repeats=5), argv)
    lengths = lengths_of(1000 if options.quick else 10_000)
    values: dict[str, list[float]] = {}
    for _ in range(options.repeats):
        for name, number in measure(lengths).items():
            values.setdefault(name, []).append(number)
    print_report(build_report("packing", values, argv=argv, packages=[]), only_json=options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
