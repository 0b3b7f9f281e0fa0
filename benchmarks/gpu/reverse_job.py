"""The job of the reverse example, as several parts of the suite run it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu.jobs import device_flags, one_at_a_time
from examples.reverse.prepare import prepare
from vime.cli.demo import train_command


def reverse_command(folder: Path, run: Path, steps: int, gpus: int) -> list[str]:
    """The command, with the example's model and prompts in `folder/example`."""
    return [*train_command(folder / "example", run, steps, 0), *device_flags(gpus)]


def prepare_example(folder: Path) -> None:
    """Make them; what is there stays."""
    with one_at_a_time(folder):
        if not (folder / "example").exists():
            prepare(folder / "example")
