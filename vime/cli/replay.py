"""`vime replay`: train one stored rollout again and compare every number with what the run logged."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from pipeline.replay.replay import ReplayOptions, ReplayReport, replay
from pipeline.replay.source import read_source
from vime.cli.exit_codes import ExitCode
from vime.cli.help_text import place
from vime.cli.look import command_parser, count, run_of, show, table
from vime.errors import SettingsError
from vime.outputs import empty_output_folder, temporary_folder

MOST_SAMPLES = 32
MOST_DIFFERENCES = 10


def replay_rollout(words: list[str]) -> int:
    """Run the command; the exit status."""
    parser = command_parser(
        "vime replay",
        "Train one stored rollout again from the newest commit before it, without engines, and compare loss, gradient "
        "norm, each sample's loss and the updated parameters with the run's log. The run folder is only read.",
        [
            "vime replay runs/a --rollout 12 --check",
            "vime replay runs/a --rollout 12 --diff changed.toml",
            "vime replay copied/a --rollout 12 --hf-checkpoint models/qwen --settings one_rank.toml",
        ],
        also=[ExitCode.UNSOUND],
    )
    parser.add_argument("--rollout", type=count, required=True, metavar="N", help="rollout batch, counted from 0")
    parser.add_argument("--branch", default=None, help="session that trained it; the one that counts when left out")
    parser.add_argument(
        "--check", action="store_true", help=f"end with {ExitCode.UNSOUND.value} when anything differs from the log"
    )
    parser.add_argument(
        "--diff", default=None, metavar="FILE",
        help="settings (TOML or YAML, as --config) for this rollout alone; shows what they change for each sample",
    )  # fmt: skip
    parser.add_argument(
        "--settings", default=None, metavar="FILE",
        help="settings for the whole replay, for example another number of ranks; compared within --tolerance then",
    )  # fmt: skip
    parser.add_argument("--hf-checkpoint", default=None, metavar="DIR", help="where the run's --hf-checkpoint is here")
    parser.add_argument(
        "--tolerance", type=float, default=1e-3, help="relative difference allowed under another layout (default 1e-3)"
    )
    parser.add_argument(
        "--scratch", type=place, default=None, metavar="DIR", help="empty folder for what is written; kept afterwards"
    )
    options = parser.parse_args(words)
    if options.check and options.diff is not None:
        raise SettingsError("--check compares with the run, --diff changes it.", next_step="Leave out one of the two.")
    wanted = ReplayOptions(options.hf_checkpoint, options.settings, options.diff, options.tolerance)
    source = read_source(run_of(options), options.rollout, options.branch)
    given: Path | None = options.scratch
    scratch = temporary_folder("vime-replay-") if given is None else empty_output_folder("--scratch", given)
    try:
        report = replay(source, scratch, wanted)
    finally:
        if given is None:
            shutil.rmtree(scratch, ignore_errors=True)
    if options.json:
        print(msgspec.json.encode(report).decode())
    else:
        _show(report)
    comparison = report.comparison
    failed = options.check and (comparison.differences or not comparison.num_values)
    return ExitCode.UNSOUND if failed else ExitCode.DONE


def _show(report: ReplayReport) -> None:
    start = "the first weights of the run" if report.commit is None else f"the commit of rollout {report.commit}"
    again = ", ".join(map(str, report.trained))
    print(f"Rollout {report.rollout_id} of session {report.branch}: from {start}, trained again: {again}.")
    comparison = report.comparison
    if comparison.layout_differences:
        print(
            f"Another layout ({'; '.join(comparison.layout_differences)}): numbers may differ by "
            f"{comparison.tolerance:g} of their size, parameters are not compared."
        )
    if report.metric_changes:
        rows = [(change.name, change.logged, change.found) for change in report.metric_changes]
        show(table(("metric of the last step", "run", "changed"), rows, right=("run", "changed")))
        samples = [(c.sample_index, c.logged, c.found) for c in report.sample_changes[:MOST_SAMPLES]]
        show(table(("sample", "loss in the run", "changed"), samples, right=("sample", "loss in the run", "changed")))
        left = len(report.sample_changes) - MOST_SAMPLES
        if left > 0:
            print(f"and {left} more with smaller changes; --json lists all.")
        if comparison.num_values:
            print(f"Rollouts before it: {comparison.words}.")
    else:
        for difference in comparison.differences[:MOST_DIFFERENCES]:
            print(f"  {difference}")
    print(report.verdict)
