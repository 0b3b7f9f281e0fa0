"""The reverse task on the devices at hand: it learns, is killed whole and resumes, and engine and trainer agree."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import Job, describe_devices, num_gpus, steady, without_folder
from benchmarks.gpu.reverse_job import prepare_example, reverse_command
from benchmarks.report import benchmark_parser, build_report, print_report
from recovery.audit import audit_run
from vime.cli.demo_report import read_steps
from vime.errors import VimeError

DESCRIPTION = """\
Trains the model of examples/reverse by `vime train`, kills the whole process tree with kill -9 a few steps after a
commit, starts the same command again and lets it end. bf16 on GPUs, float32 on a CPU; with one GPU trainer and engine
share it, with two each has one.

  reward_first, reward_last   mean exact reward of the first and of the last five steps
  steps_to_goal               steps until the mean of five is 0.9; 0 when it isn't reached
  parity_mean                 trainer against engine at the start, mean absolute difference of log-probabilities
  parity_mean_resumed         the same after the resume
  cold_start_s, resume_s      from the command to the first step that it trained
  resume_over_cold            their ratio
  lost, trained_twice         groups, counted from the journal and the ranks' logs
  rolled_back                 groups trained after the last commit before the kill, and trained anew
  step_s, train_s, publish_s, pause_s, wait_s
                              medians of the steady steps; the last is the trainer's wait for groups
"""
STEPS, QUICK_STEPS = 120, 12
PAST_COMMIT = 3
WINDOW, GOAL = 5, 0.9
TIMES = ("step_s", "train_s", "publish_s", "pause_s", "wait_s")


def run(folder: Path, steps: int, more: Sequence[str]) -> dict[str, list[float]]:
    """One run with a kill in its middle; the values of the report."""
    prepare_example(folder)
    interval = max(2, steps // 12)
    command = reverse_command(folder, folder / "run", steps, num_gpus())
    job = Job([*command, "--save-interval", str(interval), *more], folder / "run", folder / "job.log")
    cold_s = job.killed_after(steps // 2 // interval * interval + min(PAST_COMMIT, interval - 1))
    resume_s = job.to_end()
    report = audit_run(folder / "run")
    records = list(read_steps(folder / "run").values())
    rewards = [record["reward_mean"] for record in records]
    parity = job.parity_means()
    values = {
        "reward_first": statistics.fmean(rewards[:WINDOW]),
        "reward_last": statistics.fmean(rewards[-WINDOW:]),
        "steps_to_goal": steps_to_goal(rewards),
        "parity_mean": parity[0],
        "parity_mean_resumed": parity[-1],
        "cold_start_s": cold_s,
        "resume_s": resume_s,
        "resume_over_cold": resume_s / cold_s,
        "lost": len(report.lost),
        "trained_twice": len(report.trained_twice),
        "rolled_back": report.rolled_back,
    } | medians(records)
    return {name: [float(value)] for name, value in values.items()}


def steps_to_goal(rewards: Sequence[float], goal: float = GOAL) -> int:
    """Steps after which the mean of the last `WINDOW` rewards is `goal` or more; 0 for never."""
    means = [statistics.fmean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1)]
    return next((WINDOW + number for number, mean in enumerate(means) if mean >= goal), 0)


def medians(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of each time, over the steady steps."""
    return {name: statistics.median(record[name] for record in steady(records)) for name in TIMES}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status. Flags that it doesn't know go to `vime train`."""
    parser = benchmark_parser("gpu.reverse_run", DESCRIPTION, repeats=1)
    parser.add_argument("--folder", type=Path, help="where run and logs stay; a new temporary folder when left out")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"rollout batches (default {STEPS})")
    options, more = parser.parse_known_args(argv)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="vime-reverse-"))
    started = time.monotonic()
    try:
        values = run(folder, QUICK_STEPS if options.quick else options.steps, more)
    except VimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report = build_report(
        "gpu.reverse_run",
        values,
        argv=without_folder(argv),
        packages=["vllm", "torch", "megatron-core", "ray"],
        folder=folder,
    )
    report["machine"] |= describe_devices()
    report["seconds"] = round(time.monotonic() - started, 1)
    print_report(report, only_json=options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
