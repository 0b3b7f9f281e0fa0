"""What the commands that look into a run share: their arguments, their words and how they print."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console, RenderableType
from rich.table import Table

from pipeline.prompt_places import PromptPlace
from recovery.run_location import RunLocation, locate_run
from storage.positions import first_position, segment_of
from vime.cli.exit_codes import ExitCode
from vime.cli.help_text import help_parser, place

UNBOUNDED = 2**20
"""Columns of a table that goes into a file or a pipe: no value is broken there."""


def command_parser(
    prog: str, description: str, examples: Sequence[str], *, also: Sequence[ExitCode] = ()
) -> argparse.ArgumentParser:
    """A parser with the run folder and the options that every command has. `also`: see `help_parser`."""
    parser = help_parser(prog, description, examples, also=also)
    parser.add_argument("run", type=place, metavar="RUN", help="run folder (--save of `vime train`)")
    parser.add_argument("--pool", type=place, default=None, help="queue root, where the run folder leads to none")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def run_of(options: argparse.Namespace, *, needs_queue: bool = True) -> RunLocation:
    """The run that a command is about. Raises `NoRunError`."""
    return locate_run(options.run, options.pool, needs_queue=needs_queue)


def count(text: str) -> int:
    """A count on the command line."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def print_json(report: Any) -> None:
    """A report as indented JSON."""
    print(msgspec.json.format(msgspec.json.encode(report), indent=1).decode())


def show(report: RenderableType) -> None:
    """Print tables, as wide as the terminal or elsewhere as they are, without the blanks that fill up lines."""
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else UNBOUNDED)
    with console.capture() as captured:
        console.print(report)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = ()) -> Table:
    """A plain table; `right` names the columns that are aligned to the right. None is shown as a dash."""
    result = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        result.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        result.add_row(*("-" if value is None else str(value) for value in row))
    return result


def duration(seconds: float) -> str:
    """A length of time in its two largest units."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            smaller = {"d": ("h", 3600), "h": ("min", 60), "min": ("s", 1)}[unit]
            return f"{int(seconds // length)} {unit} {int(seconds % length // smaller[1])} {smaller[0]}"
    return f"{max(seconds, 0.0):.1f} s"


def moment(time_s: float) -> str:
    """A moment in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))


def num_bytes(count: int) -> str:
    """A number of bytes in binary units."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def position_words(position: int | None) -> str | None:
    """A position as segment:number, both from 0."""
    if position is None:
        return None
    return f"{segment_of(position)}:{position - first_position(segment_of(position))}"


def place_words(place: PromptPlace | None) -> str:
    """Where a prompt comes from."""
    if place is None:
        return "-"
    return (place.place or f"record {place.row}") + (f", epoch {place.epoch}" if place.epoch else "")


def span(pair: tuple[int, int] | None) -> str:
    """A first and last number."""
    if pair is None:
        return "-"
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]} to {pair[1]}"


def first_of(numbers: Sequence[int], limit: int = 10) -> str:
    """A list of numbers, cut where it is long."""
    more = len(numbers) - limit
    return ", ".join(map(str, numbers[:limit])) + (f" and {more} more" if more > 0 else "")


def one_line(text: str, width: int = 100) -> str:
    """The beginning of a text, without line breaks."""
    flat = text.replace("\r", "\\r").replace("\n", "\\n")
    return flat if len(flat) <= width else f"{flat[: width - 3]}..."
