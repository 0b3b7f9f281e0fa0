"""`vime parity`: whether a job's engines and its trainer agree on log-probabilities."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console

from pipeline.parity_verdict import EngineParity, refuse_difference
from pipeline.progress import ProgressView
from vime.algorithms.parity import Gap, ParityReport
from vime.cli.exit_codes import ExitCode
from vime.cli.help_text import endings_help
from vime.cli.look import print_json, show, table
from vime.cli.passed_on import passed_on_problems
from vime.cli.this_machine import this_machine
from vime.errors import SettingsError
from vime.outputs import temporary_folder
from vime.settings.resolve import Resolved, resolve
from vime.settings.rules.quantities import num_own_engines
from vime.settings.validate import validate
from vime.versions import check_versions

USAGE = """usage: vime parity FLAG ... [--json]

Start the engines and trainer ranks of a job (the flags of `vime train`), send the weights of --hf-checkpoint, sample
--parity-probes prompts from each engine, and score the same tokens with the trainer. Prints the mean, the 99th
percentile and the maximum of the absolute difference of log-probabilities for each engine, and how near the engine is
to what each known fault predicts:

  raw_log_probs     log-probabilities before temperature and truncation
  no_temperature    sampling without the temperature
  scaled_log_probs  log-probabilities, not logits, divided by the temperature
  head_precision    output head in float32 on one side and in bfloat16 on the other
  stale_weights     an engine with the weights that it was started with
  prefix_cache      only requests with a cached prefix differ

`vime train` makes the same comparison when it starts. Nothing is written, --save may be that of a run.
Ends with 2 when the mean difference of an engine is above --parity-threshold.
"""
NUMBERS = ("mean", "p99", "max")


def parity(words: list[str]) -> int:
    """Run the comparison and print it; the exit status.

    Raises:
        ParityError: an engine differs by more than --parity-threshold.
    """
    if "-h" in words or "--help" in words:
        print(f"{USAGE}\n{endings_help()}")
        return ExitCode.DONE
    resolved = resolve(words)
    settings = resolved.settings
    _refuse(resolved)
    check_versions()
    for warning in validate(settings, machine=this_machine(), more=list(passed_on_problems(settings))):
        print(f"warning: {warning}", file=sys.stderr)
    from pipeline.parity_run import measure_parity

    folder = temporary_folder("vime-parity-")
    with ProgressView(Console(stderr=True, highlight=False, soft_wrap=True)) as view:
        found = measure_parity(settings, folder, view.waiting)
    shutil.rmtree(folder)  # what doesn't start names its log in there
    _print(found, as_record=settings.command.json)
    refuse_difference(found, settings.engine.parity_threshold)
    return ExitCode.DONE


def _refuse(resolved: Resolved) -> None:
    if resolved.settings.command.dry_run:
        raise SettingsError("--dry-run starts nothing, `vime parity` compares what runs.", next_step="Leave it out.")
    if not resolved.settings.engine.parity_probes:
        raise SettingsError("--parity-probes is 0, allowed here: 1 or more.", next_step="Leave it out.")
    if not num_own_engines(resolved.settings):
        raise SettingsError("This job starts no engine that could be compared.", next_step="Give --rollout-num-gpus 1.")


def _print(found: Sequence[EngineParity], *, as_record: bool) -> None:
    if as_record:
        print_json(found)
    else:
        for each in found:
            print(each)
            show(table(("compared with", *NUMBERS, ""), list(_rows(each.report)), right=NUMBERS))


def _rows(report: ParityReport) -> Iterator[tuple[object, ...]]:
    """Trainer and engine first, then the engine and what each known fault predicts."""
    yield "the trainer", *_numbers(report.gap), ""
    for finding in report.findings:
        if finding.gap is None:
            yield finding.fault, None, None, None, "would not show on these tokens"
        else:
            yield finding.fault, *_numbers(finding.gap), "explains the difference" if finding.differs else ""


def _numbers(gap: Gap) -> list[str]:
    return [f"{value:.2g}" for value in (gap.mean, gap.p99, gap.max)]
