"""Restarts and failovers, timed."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.history import PENDING, build_fast, measure_in_fresh_process
from benchmarks.recovery.failover import failover_gaps
from benchmarks.recovery.restart import restart_over_cold_start
from benchmarks.report import benchmark_parser, build_report, parse_options, print_report

DESCRIPTION = """\
Measures how long a run stands still after a crash. Each repeat of

  restart    starts a job on a fresh folder, kills every process of it by SIGKILL some steps later, and runs the same
             command again; both are timed from the command to their first step:
             cold_start_s_standin, kill_to_step_s_standin, kill_to_step_over_cold_start_standin;
             with --real-engine also cold_start_s_real_engine, ...
  history    opens two queues as a resume does, in fresh processes, one with 100,000 trained groups behind it (with
             --quick 2,000), one with 100, both with PENDING that wait: history_s_short, history_s_long, history_ratio
  failover   kills the coordinator of a running job: failover_gap_s, from the kill to the end of the first step whose
             groups only its successor can have accepted, less the time of as many steps before it
  juicefs    kills a coordinator with its JuiceFS client, as a host's death does; a successor waits on another client:
             juicefs_gap_s until it has the queue open, juicefs_lock_release_s until a plain lock of the dead client is
             free, and their difference juicefs_gap_over_release_s. Needs FUSE, Redis and JuiceFS, so it is asked for.

--parts chooses among them; the default is all but juicefs.
"""
PARTS = ("restart", "history", "failover", "juicefs")
HISTORY_BATCH = 100
SHORT, LONG, QUICK_LONG = 100, 100_000, 2_000


def history_ratios(folder: Path, num_long: int, *, repeats: int) -> dict[str, list[float]]:
    """Seconds to open a queue with few and with many trained groups behind it, taking turns."""
    sizes = {"short": SHORT, "long": num_long}
    roots = {
        name: build_fast(folder, name, size, reclaim=False, batch_size=HISTORY_BATCH) for name, size in sizes.items()
    }
    values: dict[str, list[float]] = {}
    for repeat in range(repeats):
        names = list(sizes) if repeat % 2 == 0 else list(sizes)[::-1]
        found = {name: measure_in_fresh_process(roots[name]) for name in names}
        for name, size in sizes.items():
            if (found[name].trained, found[name].pending) != (size, PENDING):
                raise RuntimeError(f"{name}: expected {size} trained and {PENDING} pending, got {found[name]}")
            values.setdefault(f"history_s_{name}", []).append(found[name].restart_s)
        values.setdefault("history_ratio", []).append(found["long"].restart_s / found["short"].restart_s)
    return values


def juicefs_gaps(folder: Path, *, repeats: int) -> dict[str, list[float]]:
    """On a volume of its own, taken down at the end."""
    from benchmarks.recovery.dead_client import failovers_after_a_dead_client
    from tests.juicefs.two_mounts import TwoMounts, why_impossible

    reason = why_impossible(folder)
    if reason:
        raise RuntimeError(f"no JuiceFS volume here: {reason}")
    volume = TwoMounts(folder / "volume")
    try:
        return failovers_after_a_dead_client(volume, repeats=repeats)
    finally:
        volume.down("--purge")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Values of the parts that were asked for."""
    repeats, values = options.repeats, {}
    if "restart" in options.parts:
        values |= restart_over_cold_start(folder, standin=True, repeats=repeats)
        if options.real_engine:
            values |= restart_over_cold_start(folder, standin=False, repeats=repeats)
    if "history" in options.parts:
        values |= history_ratios(folder, QUICK_LONG if options.quick else LONG, repeats=repeats)
    if "failover" in options.parts:
        values |= failover_gaps(folder, repeats=repeats)
    if "juicefs" in options.parts:
        values |= juicefs_gaps(folder, repeats=repeats)
    return values


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = benchmark_parser("recovery", DESCRIPTION.replace("PENDING", str(PENDING)), repeats=5)
    parser.add_argument(
        "--folder", type=Path, default=Path(), help="folder on the file system to measure (default: the present one)"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:-1], help="what to measure")
    parser.add_argument("--real-engine", action="store_true", help="restarts with vLLM itself, too")
    options = parse_options(parser, argv)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix=".bench-") as temporary:
        folder = Path(temporary).resolve()
        report = build_report(
            "recovery",
            measure(options, folder),
            argv=argv,
            packages=["ray", "straw-queue", "torch", "megatron-core"],
            folder=folder,
        )
    print_report(report, only_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
