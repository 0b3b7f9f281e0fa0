"""What is said about a word that is no command."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from vime.cli.exit_codes import ExitCode
from vime.settings.passed_on import nearest

_AGAIN = "Run the same `vime train` command again: it goes on with the run in --save."
_OTHERWISE = {("vime", "resume"): _AGAIN, ("vime", "restart"): _AGAIN, ("vime", "continue"): _AGAIN}
"""Words that others have commands for, and what does it here."""


def unknown_command(group: str, word: str, commands: Iterable[str]) -> ExitCode:
    """Name the nearest command of `group` (`vime`, `vime queue`); the exit status."""
    near = nearest(word, commands)
    told = near and f" The nearest one is {near}."
    step = _OTHERWISE.get((group, word), f"`{group} --help` lists the commands.")
    print(f"{group}: unknown command {word!r}.{told}\n      Next: {step}", file=sys.stderr)
    return ExitCode.USER
