"""Kill a job again and again, resume it each time, and count what that cost."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import msgspec

from benchmarks.chaos.kills import Layout, plan_kill
from benchmarks.chaos.session import Campaign, Outcome, steps_of
from benchmarks.report import build_report, print_report
from recovery.audit import audit_run
from storage.files import append_durably

DESCRIPTION = """\
Starts `vime train` on a tiny model, kills one of its processes (or all) by SIGKILL, resumes, and so on: half of the
kills at a named step of publish, accept, plan, train, publish weights, save and commit, the others at a random moment.
The number of trainer ranks and engines changes between sessions. In the end a session goes on to the run's end, and
what is left is checked by the audit, which shares no code with what did the work.

  kills                kills that hit (a session that had ended before the moment came does not count)
  lost                 groups that are neither trained, waiting, in flight nor dropped with a reason, or unreadable
  trained_twice        samples that the newest line of branches trained more than once
  skipped_prompts      prompts that were never submitted, or twice
  version_regressions  steps whose policy version is below that of a step before
  orphans              processes that outlived their session by 30 s
  stuck                sessions that neither went on nor ended in time, and the last one, when it did not end well

Kill N of seed S is always the same. With --folder a campaign is made in parts: --from 0 --to 99, then --from 100 ...
The exit status is 1 when any value but kills is not 0.
"""
FINAL_STEPS = 3
FOREVER = 100_000
SKIPPED = (": never submitted", ": submitted twice")


class KillRecord(msgspec.Struct, frozen=True):
    """One line of the campaign's log."""

    number: int
    kill: str
    killed: bool
    how: str
    stuck: bool
    orphans: list[str]


@dataclass(frozen=True)
class Verdict:
    """What the whole run shows after its last session."""

    lost: list[str] = field(default_factory=list)
    trained_twice: list[str] = field(default_factory=list)
    skipped_prompts: list[str] = field(default_factory=list)
    version_regressions: list[str] = field(default_factory=list)


def judge(run: Path) -> Verdict:
    """Audit a run whose last session has ended well."""
    report = audit_run(run)
    skipped = [line for line in report.lost if line.endswith(SKIPPED)]
    lost = [line for line in report.lost if line not in skipped]
    if not report.identity_holds:
        lost.append(f"the identity does not hold: {report}")
    steps = steps_of(run)
    regressions = [
        f"rollout {after['rollout_id']}: version {after['policy_version']} after {before['policy_version']}"
        for before, after in pairwise(steps)
        if after["policy_version"] < before["policy_version"]
    ]
    return Verdict(lost, list(map(str, report.trained_twice)), skipped, regressions)


def run_campaign(campaign: Campaign, numbers: range, seed: int, layouts: list[Layout]) -> list[Outcome]:
    """Make the kills of these numbers, then let the run end; each outcome is also a line of `kills.jsonl`."""
    outcomes = []
    for number in numbers:
        kill = plan_kill(seed, number, layouts)
        outcome = campaign.run(kill, FOREVER)
        print(
            f"{kill}: {outcome.how if outcome.killed else f'not reached, {outcome.how}'}", file=sys.stderr, flush=True
        )
        record = KillRecord(number, str(kill), outcome.killed, outcome.how, outcome.stuck, outcome.orphans)
        append_durably(campaign.folder / "kills.jsonl", msgspec.json.encode(record))
        outcomes.append(outcome)
    last = max((step["rollout_id"] for step in steps_of(campaign.job.run)), default=-1)
    outcomes.append(campaign.finish(last + 1 + FINAL_STEPS, layouts[0]))
    return outcomes


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    folder = Path(options.folder or tempfile.mkdtemp(prefix="vime-chaos-"))
    campaign = Campaign(folder, standin=options.engine == "standin")
    campaign.prepare()
    engines = (1, 2) if options.engine == "standin" else (1,)
    layouts = [Layout(ranks, number) for ranks in (1, 2) for number in engines]
    first, last = options.first, options.kills - 1 if options.last is None else options.last
    outcomes = run_campaign(campaign, range(first, last + 1), options.seed, layouts)
    verdict = judge(campaign.job.run)
    wrong = {
        "lost": verdict.lost,
        "trained_twice": verdict.trained_twice,
        "skipped_prompts": verdict.skipped_prompts,
        "version_regressions": verdict.version_regressions,
        "orphans": [line for outcome in outcomes for line in outcome.orphans],
        "stuck": [outcome.how for outcome in outcomes if outcome.stuck],
    }
    for name, lines in wrong.items():
        for line in lines:
            print(f"{name}: {line}", file=sys.stderr)
    counts = {
        "kills": sum(outcome.killed for outcome in outcomes),
        **{name: len(lines) for name, lines in wrong.items()},
    }
    report = build_report(
        "chaos",
        {name: [float(count)] for name, count in counts.items()},
        argv=argv,
        packages=["ray", "straw-queue", "torch", "megatron-core"],
        folder=folder,
    )
    print_report(report, only_json=options.json)
    is_sound = not any(wrong.values())
    if is_sound and options.folder is None:
        shutil.rmtree(folder)
    else:
        print(f"The run and the sessions' logs are in {folder}.", file=sys.stderr)
    return 0 if is_sound else 1


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line on standard output")
    parser.add_argument("--kills", type=int, default=4, help="kills of a whole campaign (default 4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="I", help="first kill (default 0)")
    parser.add_argument("--to", dest="last", type=int, metavar="J", help="last kill (default: the last of --kills)")
    parser.add_argument("--engine", choices=("standin", "vllm"), default="standin", help="default standin")
    parser.add_argument("--folder", help="where the run is kept, and found again (default: a temporary folder)")
    options = parser.parse_args(argv)
    if options.first and options.folder is None:
        parser.error("--from needs the --folder of the kills before it")
    return options


if __name__ == "__main__":
    sys.exit(main())
