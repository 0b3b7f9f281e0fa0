"""`vime runs`: the sessions of a run, their commits, and what keeps each of those."""

from __future__ import annotations

from rich.console import Group, RenderableType

from recovery.checkpoint_retention import Keeping
from recovery.runs_report import CommitReport, RunsReport, runs_report
from vime.cli.exit_codes import ExitCode
from vime.cli.look import command_parser, num_bytes, print_json, run_of, show, table
from vime.counted import counted

COLUMNS = ("session", "from", "commit", "folder", "size", "version", "held by", "problem")


def runs(words: list[str]) -> int:
    """Run the command; the exit status."""
    parser = command_parser(
        "vime runs",
        "List the sessions of a run with the commits that each wrote, and what keeps each commit. "
        "Nothing is locked and nothing is written.",
        [
            "vime runs runs/a",
            "vime runs runs/a --verify",
            "vime train ... --load runs/a/rollout/committed_19.json   go on from any of them",
        ],
    )
    parser.add_argument("--verify", action="store_true", help="compare every file with its digest (reads all of it)")
    options = parser.parse_args(words)
    location = run_of(options, needs_queue=False)
    checkpoint = location.settings.checkpoint
    keeping = Keeping(checkpoint.keep_checkpoints, checkpoint.keep_every)
    report = runs_report(location, keeping, verify=options.verify)
    if options.json:
        print_json(report)
    else:
        show(runs_table(report))
    return ExitCode.DONE


def runs_table(report: RunsReport) -> RenderableType:
    """The report as a table, one row a commit, and what else there is below it."""
    rows: list[tuple[object, ...]] = []
    for session in report.sessions:
        begun = "-" if session.parent_branch is None else f"{session.parent_branch} {session.parent_rollout}"
        rows += [(session.branch, begun, *_cells(commit)) for commit in session.commits]
        if not session.commits:
            rows.append((session.branch, begun, None, session.directory, None, None, None, None))
    rows += [("unknown", None, *_cells(commit)) for commit in report.other_commits]
    below = [f"{name}: no commit record, so it is never chosen" for name in report.unfinished]
    below += [f"{owner.owner} keeps {counted(owner.num_packs, 'pack')} of samples" for owner in report.archives]
    if report.num_leased:
        below.append(f"{counted(report.num_leased, 'group')} leased, with the samples so far")
    if not rows:
        return Group(f"{report.run} has no session yet.", *below)
    return Group(table(COLUMNS, rows, right=("commit", "size", "version")), *below)


def _cells(commit: CommitReport) -> tuple[object, ...]:
    held = ", ".join(commit.held_by) or "nothing: the next commit removes it"
    size = num_bytes(commit.num_bytes)
    return commit.rollout_id, commit.directory, size, commit.weight_version, held, commit.problem
