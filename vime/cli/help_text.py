"""How the help of a command is laid out: what it does, its options, examples, and how it may end."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path

from vime.cli.exit_codes import ExitCode, exit_codes_help
from vime.folders import unreachable

_MARGIN = 2
"""Columns that argparse leaves free at the right, where it wraps options."""
_OF_ANY = (ExitCode.DONE, ExitCode.USER, ExitCode.ENVIRONMENT, ExitCode.INTERNAL)


def help_parser(
    prog: str, description: str, examples: Sequence[str], *, also: Sequence[ExitCode] = (), usage: str | None = None
) -> argparse.ArgumentParser:
    """A parser without arguments yet. `also` are exit statuses that few commands have."""
    return argparse.ArgumentParser(
        prog=prog,
        usage=usage,
        description=textwrap.fill(description, shutil.get_terminal_size().columns - _MARGIN),
        epilog="examples:\n" + "".join(f"  {example}\n" for example in examples) + f"\n{endings_help(*also)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def place(text: str) -> Path:
    """A file or folder on the command line, there or not."""
    fault = unreachable(text)
    if fault is not None:
        raise argparse.ArgumentTypeError(f"{text!r} can't be looked up: {fault}")
    return Path(text)


def endings_help(*also: ExitCode) -> str:
    """The exit statuses that every command has, and `also` those."""
    return f"{exit_codes_help([*_OF_ANY, *also])}`vime --help` lists those of all commands.\n"
