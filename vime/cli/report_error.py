"""How an error that ends a command appears in the terminal."""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from pathlib import Path

from vime.cli.exit_codes import ExitCode, exit_code
from vime.errors import VimeError


def report_error(error: Exception) -> ExitCode:
    """Print the error with its next step, never a bare traceback; the exit status.

    For internal errors the trace goes to a file that the last line names.
    """
    code = exit_code(error)
    message, next_step = _unexpected(error), "Report it with the trace."
    if isinstance(error, VimeError):
        message, next_step = error.message, error.next_step
    print(f"\nvime: {message}", file=sys.stderr)
    if next_step:
        print(f"      Next: {next_step}", file=sys.stderr)
    if code is ExitCode.INTERNAL:
        print(f"      Trace: {_write_trace(error)}", file=sys.stderr)
    return code


def _unexpected(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"Unexpected {type(error).__name__}{where}: {error}"


def _write_trace(error: Exception) -> str:
    """Path of a new file with the trace, or why there is none."""
    text = "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix=time.strftime("vime-trace-%Y%m%d-%H%M%S-"), suffix=".txt", delete=False
        ) as file:
            file.write(text)
    except OSError as failure:
        return f"could not be written ({failure})"
    return file.name
