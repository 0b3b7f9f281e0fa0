"""`vime audit`: count a stopped run's groups independently."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.run_folder import RunFolder
from pipeline.session_lock import refuse_running
from recovery.audit import audit_run
from recovery.audit_parts import AuditReport
from recovery.run_location import locate_run
from vime.cli.exit_codes import ExitCode
from vime.cli.help_text import help_parser, place
from vime.cli.look import count
from vime.errors import SessionRunningError

DEFAULT_LIMIT = 20


def audit(words: list[str]) -> int:
    """Print the counts as JSON; the exit status. Raises `NoRunError` or `StorageError`."""
    parser = help_parser(
        "vime audit",
        "Count a stopped run's groups from its raw journal and the ranks' training logs, sharing no code with what did "
        "the work. Prints JSON; `lost` and `trained_twice` are empty in a sound run.",
        ["vime audit runs/a", "vime audit runs/a --limit 1000 | jq .lost"],
        also=[ExitCode.UNSOUND],
    )
    parser.add_argument("run", type=place, metavar="RUN", help="run folder (--save of `vime train`)")
    parser.add_argument("--pool", type=place, default=None, help="queue root, where the run folder leads to none")
    parser.add_argument(
        "--limit", type=count, default=DEFAULT_LIMIT, help=f"most entries of each list (default {DEFAULT_LIMIT})"
    )
    options = parser.parse_args(words)
    _warn_of_live(options.run, options.pool)
    report = audit_run(options.run, options.pool)
    print(json.dumps(_shortened(report, options.limit), indent=1))
    sound = report.identity_holds and not report.lost and not report.trained_twice
    return ExitCode.DONE if sound else ExitCode.UNSOUND


def _warn_of_live(run: Path, pool: Path | None) -> None:
    """Say on standard error that the run is live, if it is. Raises `NoRunError`."""
    location = locate_run(run, pool, needs_queue=False)
    try:
        refuse_running(RunFolder(location.root, location.pool))
    except SessionRunningError as error:
        print(
            f"warning: {error.message} What it writes while it is counted can show as lost or leave the counts "
            "unequal; `vime queue status` counts a live run.",
            file=sys.stderr,
        )


def _shortened(report: AuditReport, limit: int) -> dict[str, object]:
    return {
        **dataclasses.asdict(report),
        "lost": _first(report.lost, limit),
        "trained_twice": _first(report.trained_twice, limit),
    }


def _first(entries: Sequence[str], limit: int) -> list[str]:
    more = len(entries) - limit
    return [*entries[:limit], f"and {more} more"] if more > 0 else list(entries)
