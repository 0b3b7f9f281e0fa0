"""Kill a job again and again, resume it each time, and count what that cost."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import msgspec

from benchmarks.chaos.campaign_log import CampaignLog, KillRecord
from benchmarks.chaos.kills import Kill, Layout, plan_kill
from benchmarks.chaos.session import Campaign, Outcome, Patience
from benchmarks.chaos.verdict import accepted_groups, judge
from benchmarks.report import build_report, print_report

DESCRIPTION = """\
Starts `vime train` on a tiny model, kills one of its processes (or all) by SIGKILL, and so on: half of the kills at a
named step of publish, accept, plan, train, publish weights, save and commit, the others at a random moment. A session
that goes on takes the next kill; one that ends is resumed, with another number of trainer ranks, engines and
producers. One session in twenty starts as a user's does; the others fork from a process that has imported torch and
Megatron, and join a Ray cluster that stands. In the end a session goes on to the run's end, and what is left is checked
by the audit, which reads journals, payloads and logs and shares no code with what wrote them.

  kills                kills that hit
  lost                 groups that are neither trained, waiting, in flight nor dropped with a reason, or unreadable, or
                       accepted before the last session and not trained by it
  trained_twice        samples that the newest line of branches trained more than once
  skipped_prompts      prompts that were never submitted, or twice, or out of their turn
  version_regressions  steps whose policy version is below that of a step before
  orphans              processes that outlived their session by 30 s
  stuck                sessions that neither went on nor ended in time, or ended unkilled or not well
  seconds_a_kill       mean of all kills; the seconds_... behind it are its parts: stop (of a session that survived),
                       start (until the first step), wait (for the moment), settle (until the session goes on or has
                       ended), leave (until its last process has), finish (the session without a kill)

Kill N of seed S is always the same. With --folder a campaign is kept: each invocation makes those of its kills that the
folder doesn't have yet, and reports on all that it has. One that is interrupted (SIGINT, SIGTERM) ends what it has
started and loses the kill that it was at.
The exit status is 1 when any value but kills and seconds is not 0.
"""
FINAL_STEPS = 8
"""Enough for all groups that can wait when the last session starts: two rolled-back batches, and two that wait."""
FOREVER = 100_000
ATTEMPTS = 3
"""For a kill whose session ended of the kill before it."""
PARTS = ("stop", "start", "wait", "settle", "leave")


def run_campaign(campaign: Campaign, log: CampaignLog, kills: Sequence[Kill], last_layout: Layout) -> set[str]:
    """Make these kills and let the run end; groups that the last session found accepted."""
    for kill in kills:
        for _ in range(ATTEMPTS):
            outcome = campaign.run(kill, FOREVER)
            log.append(_record(kill, outcome))
            print(f"{kill}: {outcome.how}", file=sys.stderr, flush=True)
            if outcome.killed or outcome.stuck:
                break
    campaign.settle_down()
    owed = accepted_groups(campaign.job.run)
    last = campaign.finish(campaign.last_rollout() + 1 + FINAL_STEPS, last_layout)
    log.append(_record(None, last))
    return owed


def _record(kill: Kill | None, outcome: Outcome) -> KillRecord:
    return KillRecord(
        number=-1 if kill is None else kill.number,
        kill="the end" if kill is None else str(kill),
        killed=outcome.killed,
        how=outcome.how,
        stuck=outcome.stuck,
        orphans=outcome.orphans,
        seconds=outcome.seconds,
    )


def count(records: Sequence[KillRecord]) -> dict[str, float]:
    """Kills, and where their time went."""
    kills = sum(record.killed for record in records)
    spent = {part: sum(record.seconds.get(part, 0.0) for record in records) for part in (*PARTS, "finish")}
    each = max(1, kills)
    return {
        "kills": kills,
        "seconds_a_kill": sum(spent.values()) / each,
        **{f"seconds_{part}": seconds / each for part, seconds in spent.items()},
    }


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    folder = Path(options.folder or tempfile.mkdtemp(prefix="vime-chaos-"))
    is_standin = not options.real_engine
    layouts = [Layout(*numbers) for numbers in product((1, 2), (1, 2) if is_standin else (1,), (1, 2))]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    patience = Patience() if is_standin else Patience(start=900.0, survive=600.0)
    campaign = Campaign(folder, standin=is_standin, forks=True, patience=patience)
    campaign.prepare()
    log = CampaignLog(folder / "kills.jsonl", seed=options.seed, real_engine=options.real_engine)
    last = options.kills - 1 if options.last is None else options.last
    numbers = [number for number in range(options.first, last + 1) if number not in log.done()]
    try:
        owed = run_campaign(campaign, log, [plan_kill(options.seed, number, layouts) for number in numbers], layouts[0])
    finally:
        campaign.close()
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    verdict = judge(campaign.job.run, owed, [json.loads(line)["input"] for line in lines])
    records = log.records()
    wrong: dict[str, list[str]] = {
        **msgspec.structs.asdict(verdict),
        "orphans": [line for record in records for line in record.orphans],
        "stuck": [f"{record.kill}: {record.how}" for record in records if record.stuck],
    }
    for name, lines in wrong.items():
        for line in lines:
            print(f"{name}: {line}", file=sys.stderr)
    values = {**count(records), **{name: len(lines) for name, lines in wrong.items()}}
    report = build_report(
        "chaos_real_engine" if options.real_engine else "chaos",
        {name: [float(value)] for name, value in values.items()},
        argv=argv,
        packages=["ray", "straw-queue", "torch", "megatron-core"],
        folder=folder,
        module="chaos",
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
    parser.add_argument("--real-engine", action="store_true", help="vLLM itself (default: a stand-in for it)")
    parser.add_argument("--folder", help="where the run is kept, and found again (default: a temporary folder)")
    options = parser.parse_args(argv)
    if options.first and options.folder is None:
        parser.error("--from needs the --folder of the kills before it")
    return options


if __name__ == "__main__":
    sys.exit(main())
