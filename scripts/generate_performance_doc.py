"""Write `docs/performance.md` from `benchmarks/results/*/*.json`: `python scripts/generate_performance_doc.py`.

Stdlib only. A result is the last line that a benchmark printed.
"""

from __future__ import annotations

import json
import operator
from pathlib import Path
from typing import Any

import performance_gpu_rows
import performance_rows
from performance_words import WORDS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TARGET = ROOT / "docs" / "performance.md"

INTRODUCTION = """\
# Performance

<!-- Written by scripts/generate_performance_doc.py from benchmarks/results; change those, not this file. -->

Each number is the median of the repeats of one run of a script in `benchmarks/`, with the smallest and the largest
repeat behind it. Both sides of a ratio take turns in the same run and end with the same bytes durable. `--help` of a
script says what it measures. `benchmarks/results/` holds every value.

The load in a heading is that of the last minute of the run. Above the number of cores, other programs took part of
them: rates are then lower than on a machine of one's own, and a ratio is as sure as its range is narrow.
"""

FLOORS = performance_rows.ROWS | performance_gpu_rows.ROWS
PICTURES = {
    "staleness": "![reward over steps with samples four policy versions old](images/staleness.png)",
}
"""Drawn by the same run of the benchmark."""
COMPARISONS = {"<=": operator.le, ">=": operator.ge}


def render(results: dict[str, list[dict[str, Any]]]) -> str:
    """The whole page; `results` are by name of the machine's folder."""
    parts = [INTRODUCTION]
    for folder, reports in results.items():
        for name in (name for name in FLOORS if any(report["benchmark"] == name for report in reports)):
            (report,) = (report for report in reports if report["benchmark"] == name)
            parts.append(_section(folder, report))
    return "\n".join(parts)


def _section(folder: str, report: dict[str, Any]) -> str:
    name, values = report["benchmark"], report["values"]
    floors = performance_gpu_rows.ROWS_IN.get(f"{folder}/{name}", FLOORS[name])
    lines = [
        f"## `{name}`, {_machine(report)}",
        "",
        f"`{report['command']}`, {report['repeats']} repeats (`benchmarks/results/{folder}/{name}.json`)",
        "",
        "| value | wanted | measured | smallest to largest | |",
        "|---|---|---|---|---|",
    ]
    for value, comparison, floor, meaning in floors:
        if name.startswith("gpu.") and value not in values:
            continue  # a part that was told --only some of its values, or an older one
        found = values[value]
        wanted = f"{comparison} {floor:g}" if comparison else ""
        missed = comparison and not COMPARISONS[comparison](found["median"], floor)
        measured = f"**{found['median']:.3g}** (missed)" if missed else f"{found['median']:.3g}"
        lines.append(f"| `{value}` | {wanted} | {measured} | {found['min']:.3g} to {found['max']:.3g} | {meaning} |")
    if unmeasured := [f"`{value}`" for value, comparison, _, _ in floors if comparison and value not in values]:
        lines += ["", f"Wanted, but not measured in this run: {', '.join(unmeasured)}."]
    words = WORDS.get(f"{folder}/{name}")
    if words is not None and floors[0][0] in values:
        medians, largest = ({key: value[which] for key, value in values.items()} for which in ("median", "max"))
        lines += ["", words(medians, report["machine"], largest)]
    if name in PICTURES:
        lines += ["", PICTURES[name]]
    return "\n".join(lines) + "\n"


def _machine(report: dict[str, Any]) -> str:
    machine = report["machine"]
    return (
        f"on {machine['gpu'] + ' (' + machine['devices'] + '), ' if 'gpu' in machine else ''}"
        f"{machine['num_cores']} cores ({machine['processor']}), {machine['memory_gib']:g} GiB, "
        f"{machine['file_system'] + ', ' if 'file_system' in machine else ''}load {machine['load_1min']:g}"
    )


def read_results() -> dict[str, list[dict[str, Any]]]:
    """Every stored result by folder."""
    return {
        folder.name: [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
        for folder in sorted(RESULTS.iterdir())
        if folder.is_dir()
    }


if __name__ == "__main__":
    TARGET.write_text(render(read_results()))
    print(f"Wrote {TARGET}.")
