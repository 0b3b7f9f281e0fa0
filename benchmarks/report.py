"""The form of every benchmark: its command line, and the one JSON object that it prints last."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

MIN_REPEATS = 5


def benchmark_parser(name: str, description: str, *, repeats: int) -> argparse.ArgumentParser:
    """Parser with what every benchmark has; `description` says what is measured."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    parser.add_argument("--quick", action="store_true", help="less work in each repeat: seconds, and rougher numbers")
    parser.add_argument(
        "--repeats", type=int, default=repeats, help=f"repeats, {MIN_REPEATS} or more (default {repeats})"
    )
    return parser


def parse_options(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parsed options; ends with a usage error when there are too few repeats for a median."""
    options = parser.parse_args(argv)
    if options.repeats < MIN_REPEATS:
        parser.error(f"--repeats is {options.repeats}, allowed: {MIN_REPEATS} or more")
    return options


def build_report(
    name: str,
    values: Mapping[str, Sequence[float]],
    *,
    argv: Sequence[str] | None,
    packages: Sequence[str],
    folder: Path | None = None,
    module: str | None = None,
) -> dict[str, Any]:
    """The JSON object. `values` maps a name with its unit to one number for each repeat; all have equal length.

    `packages` are those whose versions matter; `folder` is where files were written, when some were;
    `module` is the script's name, where one script makes several reports.

    Raises:
        ValueError: numbers of repeats that differ.
    """
    counts = {value: len(numbers) for value, numbers in values.items()}
    if len(set(counts.values())) != 1:
        raise ValueError(f"every value needs one number for each repeat, found {counts}")
    words = sys.argv[1:] if argv is None else argv
    return {
        "benchmark": name,
        "machine": describe_machine(folder),
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}},
        "command": shlex.join(["python", "-m", f"benchmarks.{module or name}", *words]),
        "repeats": next(iter(counts.values())),
        "values": {
            value: {
                "median": _rounded(statistics.median(numbers)),
                "min": _rounded(min(numbers)),
                "max": _rounded(max(numbers)),
            }
            for value, numbers in values.items()
        },
    }


def print_report(report: Mapping[str, Any], *, only_json: bool) -> None:
    """A table for people, unless `only_json`, then the JSON line."""
    if not only_json:
        width = max(len(name) for name in report["values"])
        print(f"{report['benchmark']}: median (min .. max) of {report['repeats']} repeats")
        for name, value in report["values"].items():
            print(f"  {name:<{width}}  {value['median']:>14.4g}  ({value['min']:.4g} .. {value['max']:.4g})")
    print(json.dumps(report), flush=True)


def describe_machine(folder: Path | None = None) -> dict[str, Any]:
    """Processor, cores, memory, kernel and present load; with `folder`, the type of its file system."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    machine: dict[str, Any] = {
        "processor": _processor(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "kernel": platform.release(),
        "load_1min": round(os.getloadavg()[0], 2),
    }
    if folder is not None:
        machine["file_system"] = _file_system(folder.resolve())
    return machine


def _rounded(number: float) -> float:
    """Six digits: more would be noise."""
    return float(f"{number:.6g}")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _file_system(folder: Path) -> str:
    """Type of the file system that holds a folder: that of the longest mount point above it."""
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, found, *_ = line.split()
        if folder.is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, found
    return kind
