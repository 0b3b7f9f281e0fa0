"""What is said about a word that is no command."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from vime.cli.exit_codes import ExitCode
from vime.settings.passed_on import nearest


def unknown_command(group: str, word: str, commands: Iterable[str]) -> ExitCode:
    """Name the nearest command of `group` (`vime`, `vime queue`); the exit status."""
    print(
        f"{group}: unknown command {word!r}. The nearest one is {nearest(word, commands)}.\n"
        f"      Next: `{group} --help` lists the commands.",
        file=sys.stderr,
    )
    return ExitCode.USER
