"""`vime queue`: look into the queue of a run, live or not, and change it by hand when it is not."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pipeline.dead_list import export_dead, list_dead
from pipeline.queue_changes import drop, groups_to_drop, groups_to_requeue, refuse_live, requeue
from pipeline.task_list import STATES, list_leases, list_tasks
from recovery import queue_report
from storage.queue_view import GroupView, QueueView
from vime.cli import queue_tables
from vime.cli.exit_codes import ExitCode
from vime.cli.help_text import endings_help, place
from vime.cli.look import command_parser, count, print_json, run_of, show
from vime.cli.unknown_command import unknown_command
from vime.counted import counted
from vime.errors import SettingsError

USAGE = """usage: vime queue COMMAND RUN ...

Look into the queue of a run. Nothing is locked and nothing is written, so a live run is not disturbed.

commands:
  status     how many groups are where, versions, leases, disk, and who coordinates
  tasks      groups one by one, with state, versions, rewards and the prompt's file:line
  leases     groups that are being generated, and by whom
  dead       samples that failed: reason, message, trace; --export writes all of it to a file
  versions   groups by the policy version of their oldest token
  history    sessions with their commits, and the segments of the queue

These change the queue of a run that is not running:
  requeue    submit the prompts of dropped groups again
  drop       drop groups that wait to be generated

`vime queue COMMAND --help` lists the options.
"""


def queue(words: list[str]) -> int:
    """Run one of the commands; the exit status."""
    commands = {
        "status": _status,
        "tasks": _tasks,
        "leases": _leases,
        "dead": _dead,
        "versions": _versions,
        "history": _history,
        "requeue": _requeue,
        "drop": _drop,
    }
    if not words or words[0] in ("-h", "--help"):
        print(f"{USAGE}\n{endings_help()}")
        return ExitCode.DONE if words else ExitCode.USER
    if words[0] not in commands:
        return unknown_command("vime queue", words[0], commands)
    commands[words[0]](words[1:])
    return ExitCode.DONE


def _status(words: list[str]) -> None:
    options = command_parser(
        "vime queue status",
        "Count the groups of a run and say who coordinates its queue.",
        ["vime queue status runs/a", "vime queue status runs/a --json | jq .identity"],
    ).parse_args(words)
    report = queue_report.status(run_of(options))
    if options.json:
        print_json(report)
    else:
        show(queue_tables.status(report))


def _tasks(words: list[str]) -> None:
    parser = command_parser(
        "vime queue tasks",
        "List groups of the open segments, by index.",
        ["vime queue tasks runs/a --state pending --state leased", "vime queue tasks runs/a --group 17 --json"],
    )
    parser.add_argument("--state", action="append", choices=STATES, default=[], help="only this one; may be repeated")
    parser.add_argument("--group", action="append", type=int, default=[], help="only this group; may be repeated")
    parser.add_argument("--closed", action="store_true", help="also groups of closed segments")
    parser.add_argument("--limit", type=count, default=50, help="most groups to show (default 50)")
    options = parser.parse_args(words)
    found = list_tasks(
        run_of(options), states=options.state, groups=options.group, closed=options.closed, limit=options.limit
    )
    if options.json:
        print_json(found)
    else:
        show(queue_tables.tasks(found))


def _leases(words: list[str]) -> None:
    options = command_parser(
        "vime queue leases", "List the groups that are leased now.", ["vime queue leases runs/a"]
    ).parse_args(words)
    found = list_leases(run_of(options))
    if options.json:
        print_json(found)
    else:
        show(queue_tables.leases(found))


def _dead(words: list[str]) -> None:
    parser = command_parser(
        "vime queue dead",
        "List the samples that failed, newest first, and what became of their groups.",
        [
            "vime queue dead runs/a",
            "vime queue dead runs/a --reason reward_timeout --traces",
            "vime queue dead runs/a --export failed.jsonl",
        ],
    )
    parser.add_argument("--reason", action="append", default=[], help="only this reason; may be repeated")
    parser.add_argument("--group", action="append", type=int, default=[], help="only this group; may be repeated")
    parser.add_argument("--traces", action="store_true", help="print each letter with its trace")
    parser.add_argument("--export", type=place, default=None, metavar="FILE", help="write all that match as JSON lines")
    parser.add_argument("--limit", type=count, default=20, help="most letters to show (default 20)")
    options = parser.parse_args(words)
    location = run_of(options, needs_queue=False)
    limit = None if options.export is not None else options.limit
    found = list_dead(location, reasons=options.reason, groups=options.group, limit=limit)
    if options.export is not None:
        export_dead(location, found, options.export)
        print(f"Wrote {len(found.letters)} letters to {options.export}.")
    elif options.json:
        print_json(found)
    else:
        show(queue_tables.dead(found, traces=options.traces))


def _versions(words: list[str]) -> None:
    parser = command_parser(
        "vime queue versions",
        "Count accepted groups by the policy version of their oldest token.",
        ["vime queue versions runs/a"],
    )
    parser.add_argument("--closed", action="store_true", help="also groups of closed segments")
    options = parser.parse_args(words)
    report = queue_report.versions(run_of(options), closed=options.closed)
    if options.json:
        print_json(report)
    else:
        show(queue_tables.versions(report))


def _history(words: list[str]) -> None:
    options = command_parser(
        "vime queue history",
        "List the sessions of a run with their commits, and the segments of its queue.",
        ["vime queue history runs/a"],
    ).parse_args(words)
    report = queue_report.history(run_of(options))
    if options.json:
        print_json(report)
    else:
        show(queue_tables.history(report))


def _requeue(words: list[str]) -> None:
    parser = command_parser(
        "vime queue requeue",
        "Submit the prompts of dropped groups again, as new groups at the end of the queue. The run must not be "
        "running; the next start generates them.",
        ["vime queue requeue runs/a 17 23", "vime queue requeue runs/a --all --yes"],
    )
    parser.add_argument("group", nargs="*", type=int, metavar="GROUP", help="dropped groups")
    parser.add_argument("--all", action="store_true", help="every dropped group that was not requeued before")
    _add_yes(parser)
    options = parser.parse_args(words)
    if bool(options.group) == options.all:
        raise SettingsError(
            "Name the groups to requeue, or give --all, and not both.",
            next_step="`vime queue dead RUN` lists dropped groups.",
        )
    location = run_of(options)
    refuse_live(location)
    groups = groups_to_requeue(QueueView(location.pool), options.group)
    if not groups:
        print("No dropped group is left to requeue.")
        return
    _confirm("requeue", groups, yes=options.yes)
    new = requeue(location, groups)
    if options.json:
        print_json({group.group_index: index for group, index in zip(groups, new, strict=True)})
    else:
        for group, index in zip(groups, new, strict=True):
            print(f"Group {group.group_index} is requeued as group {index}.")


def _drop(words: list[str]) -> None:
    parser = command_parser(
        "vime queue drop",
        "Drop groups that wait to be generated, for good, each with a dead letter. The run must not be running.",
        ["vime queue drop runs/a 17 --reason bad_prompt"],
    )
    parser.add_argument("group", nargs="+", type=int, metavar="GROUP", help="groups to drop")
    parser.add_argument("--reason", required=True, help="the word that they are counted under")
    _add_yes(parser)
    options = parser.parse_args(words)
    location = run_of(options)
    refuse_live(location)
    groups = groups_to_drop(QueueView(location.pool), options.group)
    _confirm("drop", groups, yes=options.yes)
    drop(location, groups, options.reason)
    if options.json:
        print_json({"dropped": options.group, "reason": options.reason})
    else:
        print(f"Dropped {counted(len(groups), 'group')} ({options.reason}).")


def _add_yes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="don't ask")


def _confirm(what: str, groups: Sequence[GroupView], *, yes: bool) -> None:
    """Ask before a change. Raises `SettingsError` when the answer is no, or there is nobody to ask."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise SettingsError(
            f"Nobody can be asked whether to {what} {counted(len(groups), 'group')}.", next_step="Add --yes."
        )
    for group in groups:
        print(f"  group {group.group_index}: {group.state}" + (f" ({group.reason})" if group.reason else ""))
    if input(f"{what.capitalize()} {counted(len(groups), 'group')}? [y/N] ").strip().lower() not in ("y", "yes"):
        raise SettingsError("Nothing was changed.", next_step="Answer y, or give --yes, to change it.")
