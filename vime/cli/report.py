"""`vime report`: one HTML file about a run, to be sent."""

from __future__ import annotations

from pathlib import Path

from recovery.run_location import locate_run
from vime.cli.exit_codes import ExitCode
from vime.cli.help_text import help_parser, place
from vime.cli.view import pages_installed
from vime.outputs import write_output


def report(words: list[str]) -> int:
    """Run the command; the exit status."""
    parser = help_parser(
        "vime report",
        "Write one HTML file with the plots of `vime view` and a summary in words. It needs nothing else to be looked "
        "at, and the run is only read.",
        ["vime report runs/a", "vime report runs/a --output a.html"],
    )
    parser.add_argument("run", type=place, metavar="RUN", help="run folder (--save of `vime train`)")
    parser.add_argument("--pool", type=place, default=None, help="queue root, where the run folder leads to none")
    parser.add_argument(
        "--output", type=place, default=None, metavar="FILE", help="default: report.html in the current folder"
    )
    options = parser.parse_args(words)
    location = locate_run(options.run, options.pool, needs_queue=False)
    with pages_installed():
        from vime.view.report import report_html

    content = report_html(location)
    path = options.output or Path("report.html")
    write_output("--output", path, content)
    print(f"Wrote {path} ({len(content) / 1e6:.1f} MB).")
    return ExitCode.DONE
