"""A reader of the output that goes away (`vime ... | head`): the command ends quietly, as Unix tools do."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable

from vime.cli.exit_codes import ExitCode


def ending_quietly(command: Callable[[], int]) -> int:
    """Run `command` and write out what it printed; its exit status, `OUTPUT_CLOSED` when nobody reads any more."""
    try:
        status = command()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if not reader_is_gone():
            raise
        _let_go()
        return ExitCode.OUTPUT_CLOSED


def reader_is_gone() -> bool:
    """Whether standard output or standard error is a pipe that nobody reads."""
    return any(_is_broken(stream) for stream in (sys.stdout, sys.stderr))


def _is_broken(stream: object) -> bool:
    try:
        descriptor = stream.fileno()  # type: ignore[attr-defined]
        poll = select.poll()
        poll.register(descriptor, 0)
        return any(events & select.POLLERR for _, events in poll.poll(0))
    except (OSError, ValueError, AttributeError):
        return False  # closed, or no file at all


def _let_go() -> None:
    """What is still buffered goes nowhere, or the interpreter would complain at its end."""
    for stream in (sys.stdout, sys.stderr):
        if _is_broken(stream):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
