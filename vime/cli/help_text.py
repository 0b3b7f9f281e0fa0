"""How the help of a command is laid out: what it does, its options, examples, and how it may end."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Sequence

from vime.cli.exit_codes import ExitCode, exit_codes_help

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


def endings_help(*also: ExitCode) -> str:
    """The exit statuses that every command has, and `also` those."""
    return f"{exit_codes_help([*_OF_ANY, *also])}`vime --help` lists those of all commands.\n"
