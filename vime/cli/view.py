"""`vime view`: a local web page about a run, live or not."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from recovery.run_location import locate_run
from vime.cli.exit_codes import ExitCode
from vime.cli.help_text import help_parser, place
from vime.errors import VersionMismatchError

DEFAULT_PORT = 8433


def view(words: list[str]) -> int:
    """Run the command until it is interrupted; the exit status."""
    parser = help_parser(
        "vime view",
        "Serve a page about a run, live or not: numbers, samples, timeline, dead letters, branches. "
        "It reads the run folder alone and writes nothing there. Ctrl-C ends it.",
        ["vime view runs/a", "vime view runs/a --compare runs/b --port 9000"],
    )
    parser.add_argument("run", type=place, metavar="RUN", help="run folder (--save of `vime train`)")
    parser.add_argument("--pool", type=place, default=None, help="queue root, where the run folder leads to none")
    parser.add_argument(
        "--compare", type=place, action="append", default=[], metavar="RUN", help="another run; may be repeated"
    )
    parser.add_argument(
        "--host", default="127.0.0.1",
        help="address to listen on (default 127.0.0.1: this machine alone; there is no password)",
    )  # fmt: skip
    parser.add_argument("--port", type=_port, default=DEFAULT_PORT, help=f"0 takes a free one (default {DEFAULT_PORT})")
    options = parser.parse_args(words)
    locations = [locate_run(options.run, options.pool, needs_queue=False)]
    locations += [locate_run(other, needs_queue=False) for other in options.compare]
    with pages_installed():
        from vime.view.server import serve

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        serve(locations, options.host, options.port, _announce)
    except KeyboardInterrupt:
        return ExitCode.DONE
    return ExitCode.DONE


@contextmanager
def pages_installed() -> Iterator[None]:
    """Around imports of pages, which take some seconds, and whose packages an installation may lack.

    Raises `VersionMismatchError`.
    """
    print("Loading the pages.", file=sys.stderr, flush=True)
    try:
        yield
    except ModuleNotFoundError as error:
        raise VersionMismatchError(
            f"The pages need the package {error.name!r}, which is not installed.",
            next_step="Install vime with its extra `view`: pip install '.[view]'.",
        ) from error


def _announce(address: str) -> None:
    print(f"{address}  (Ctrl-C ends it)")
    sys.stdout.flush()


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)
