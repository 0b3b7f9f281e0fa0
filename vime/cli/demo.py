"""`vime demo`: the reverse example through `vime train`, killed twice and resumed, then counted independently."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from recovery.audit import audit_run
from recovery.audit_parts import AuditReport
from recovery.branch import read_branches
from vime.cli.demo_report import demo_summary, draw_curves, read_steps
from vime.cli.exit_codes import ExitCode
from vime.cli.help_text import help_parser, place
from vime.errors import RunFailedError, SettingsError
from vime.outputs import empty_output_folder

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 100
SAVE_INTERVAL = 10
KILL_AFTER = (0.35, 0.7)
"""Fractions of the steps after which the kills come; a few steps past a commit, so that work is rolled back."""
STEPS_PAST_COMMIT = 4
LEFTOVER_S = 15.0
STEP_S = 900.0
"""How long the job may take from its start, or from a kill, to the step that is waited for."""


def run_demo(words: Sequence[str]) -> int:
    """Run the demo; the exit status. The last line printed is one JSON object."""
    parser = help_parser(
        "vime demo",
        "Make a tiny model, train it to reverse strings, kill the job twice and go on without losing a sample: some "
        "minutes on two cores. The last line is JSON.",
        ["vime demo", "vime demo --output runs/demo --steps 30"],
    )
    parser.add_argument("--output", type=place, default=None, metavar="DIR", help="folder (default: runs/demo-<time>)")
    parser.add_argument(
        "--steps", type=int, default=STEPS, metavar="N",
        help=f"rollout batches to train, {3 * SAVE_INTERVAL} or more (default {STEPS})",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of model, prompts and sampling (default 0)"
    )
    options = parser.parse_args(list(words))
    if options.steps < 3 * SAVE_INTERVAL:
        raise SettingsError(f"--steps is {options.steps}, allowed: {3 * SAVE_INTERVAL} or more.", next_step="Raise it.")
    output = empty_output_folder("--output", options.output or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S"))
    started = time.monotonic()
    run = output / "run"
    _say(f"1. A tiny model, its tokenizer and its prompts go to {output / 'example'}.")
    _call(
        [
            sys.executable,
            str(_example() / "prepare.py"),
            "--output",
            str(output / "example"),
            "--seed",
            str(options.seed),
        ]
    )
    command = train_command(output / "example", run, options.steps, options.seed)
    _say("2. The job, as a user would start it:\n   " + " ".join(command[2:]))
    kills = [_kill_step(options.steps, fraction) for fraction in KILL_AFTER]
    _train_until_killed(command, run, *kills)
    _say(f"   Counted from the journal, before the resume: {_identity(audit_run(run))}")
    _say("   The same command again; it resumes.\n")
    _call(command)
    report = audit_run(run)
    _say(f"\n3. Counted from the journal, after the run: {_identity(report)}")
    steps = read_steps(run)
    draw_curves(steps, kills, output / "demo.png")
    resumes = len(read_branches(run)) - 1
    summary = demo_summary(steps, report, kills=len(kills), resumes=resumes, seconds=time.monotonic() - started)
    _say(summary.words + f"\n   Curves: {output / 'demo.png'}")
    print(json.dumps(summary.numbers), flush=True)
    return ExitCode.DONE if summary.sound else ExitCode.INTERNAL


def train_command(example: Path, run: Path, steps: int, seed: int) -> list[str]:
    """The job of the demo."""
    flags = {
        "--hf-checkpoint": example / "model",
        "--prompt-data": example / "prompts.jsonl",
        "--input-key": "prompt",
        "--label-key": "label",
        "--custom-rm-path": "examples.reverse.reward.exact_match",
        "--num-rollout": steps,
        "--rollout-batch-size": 32,
        "--n-samples-per-prompt": 8,
        "--rollout-max-response-len": 6,
        "--rollout-temperature": 1.0,
        "--rollout-seed": seed,
        "--advantage-estimator": "grpo",
        "--eps-clip": 0.2,
        "--eps-clip-high": 0.28,
        "--lr": 4e-4,
        "--max-tokens-per-gpu": 2048,
        "--actor-num-nodes": 1,
        "--actor-num-gpus-per-node": 1,
        "--rollout-num-gpus": 1,
        "--rollout-num-gpus-per-engine": 1,
        "--flush-cache-interval": 0,
        "--rollout-data-transport": "straw",
        "--load": run,
        "--save": run,
        "--save-interval": SAVE_INTERVAL,
        "--vllm-max-model-len": 64,
    }
    switches = ["--use-rollout-logprobs", "--calculate-per-token-loss", "--use-dynamic-batch-size"]
    words = [word for name, value in flags.items() for word in (name, str(value))]
    return [sys.executable, "-m", "vime", "train", *words, *switches]


def _train_until_killed(command: list[str], run: Path, rank_step: int, tree_step: int) -> None:
    """Start the job, kill its trainer rank after a step and all of it after another, and see it end.

    Raises `RunFailedError` when the job ends otherwise, nothing takes the rank's place, or a process is left.
    """
    with subprocess.Popen(command, env=_environment()) as train:
        _wait_for_step(train, run, rank_step)
        victim = json.loads((run / "processes.json").read_bytes())["trainers"][0]
        _kill(victim)
        _say(f"\n   kill -9 of the trainer rank after step {_newest_step(run)}. The rest of the job goes on.\n")
        _wait_for_step(train, run, tree_step)
        if len(read_branches(run)) < 2 or psutil.pid_exists(victim):
            raise RunFailedError(f"The killed trainer rank {victim} was not replaced from a commit.")
        everything = _tree(train.pid)
        for pid in everything:
            _kill(pid)
        _say(f"\n   kill -9 of the whole process tree ({len(everything)} processes) after step {_newest_step(run)}.")
        status = train.wait(LEFTOVER_S)
    left = _still_alive(everything, LEFTOVER_S)
    _say(f"   The job ended with status {status}; {len(left)} of its {len(everything)} processes are left.")
    if status == 0 or left:
        raise RunFailedError(f"After the kill: exit status {status}, still running: {left}.")


def _wait_for_step(train: subprocess.Popen[bytes], run: Path, step: int) -> None:
    deadline = time.monotonic() + STEP_S
    while train.poll() is None and _newest_step(run) < step:
        if time.monotonic() > deadline:
            raise RunFailedError(
                f"The job did not come to step {step} within {STEP_S:g} s.", next_step=f"Look at {run / 'logs'}."
            )
        time.sleep(0.1)
    if train.poll() is not None:
        raise RunFailedError(
            f"The job ended with status {train.returncode} before step {step}.", next_step=f"Look at {run / 'logs'}."
        )


def _newest_step(run: Path) -> int:
    steps = read_steps(run)
    return max(steps) + 1 if steps else 0


def _kill_step(steps: int, fraction: float) -> int:
    return int(steps * fraction) // SAVE_INTERVAL * SAVE_INTERVAL + STEPS_PAST_COMMIT


def _tree(pid: int) -> list[int]:
    """A process and everything below it, children first."""
    process = psutil.Process(pid)
    return [child.pid for child in reversed(process.children(recursive=True))] + [pid]


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _still_alive(pids: Sequence[int], timeout_s: float) -> list[str]:
    """Processes of the list that outlive the timeout."""
    processes = []
    for pid in pids:
        try:
            processes.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return [f"{process.pid} {process.name()}" for process in alive]


def _identity(report: AuditReport) -> str:
    return (
        f"generated {report.generated} = trained {report.trained} + pending {report.pending} + in flight "
        f"{report.in_flight} + dropped {sum(report.dropped.values())}; lost {len(report.lost)}, trained twice "
        f"{len(report.trained_twice)}, rolled back {report.rolled_back}"
    )


def _call(command: list[str]) -> None:
    status = subprocess.run(command, env=_environment(), check=False).returncode
    if status != 0:
        raise RunFailedError(
            f"{' '.join(command[:4])} ... ended with status {status}.", next_step="See the lines above."
        )


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def _example() -> Path:
    folder = REPOSITORY / "examples" / "reverse"
    if not (folder / "prepare.py").is_file():
        raise SettingsError(
            f"{folder} is missing; the demo runs from a source checkout.", next_step="Clone the repository."
        )
    return folder


def _say(line: str) -> None:
    print(line, flush=True)
