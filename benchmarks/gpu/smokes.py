"""Short jobs of what other parts don't run: memory by turns, a critic, engines of others, and prefill engines."""

from __future__ import annotations

import asyncio
import math
import re
import shutil
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.gpu.engines import engine_launch, ready_engine
from benchmarks.gpu.jobs import REPOSITORY, Job, precision_flags
from benchmarks.gpu.part import Part, Stages, run_part
from benchmarks.gpu.reverse_job import prepare_example
from recovery.audit import audit_run
from vime.backends.vllm_utils.client import EngineClient
from vime.cli.demo import train_command
from vime.cli.demo_report import read_steps
from vime.cli.exit_codes import ExitCode
from vime.errors import RunFailedError

DESCRIPTION = """\
Trains the model of examples/reverse for STEPS rollout batches in each of several set-ups, and checks every job: it ends
by itself, each batch is of the version that is due, rewards and all that the trainer reports are finite, no group is
lost or trained twice. What fails a check ends the part with its name. JOB is one of

  colocated      trainer and engine take turns in the same memory, both leave it (sleep and wake on a GPU)
  ppo            a critic beside the actor, the first batch trains it alone; the trainer leaves its GPU's memory
  full, delta    an engine that the part starts itself serves both jobs, one after the other, by its address; weights
                 reach it through a folder, whole or as what has changed

  JOB_reward, JOB_loss             of the last step
  JOB_step_s                       median
  JOB_lost, JOB_trained_twice      groups, counted from the journal and the ranks' logs
  JOB_parity_mean                  trainer against engine at the start, mean absolute difference of log-probabilities
  ppo_value_loss                   of the last step
  colocated_freed_gib              that the engine gave back at each sleep, the least of them; 0 on a CPU
  full_bytes, delta_bytes          written by a publication, medians
  prefill_refused                  1: `--prefill-num-servers` is refused, with its name, before anything is started
"""
STEPS = 4
COLOCATE = ("--colocate", "--flush-cache-interval", "1")
CACHE_BYTES = 4 << 30
"""Of an engine's keys and values on a GPU; an engine that is told so doesn't mind what others free meanwhile."""
FREE_SHARE = 0.1
"""Part of a GPU's memory that must be free when an engine starts."""
CHOICES = ("prefill", "colocated", "ppo", "external")
SLEPT = re.compile(r"leep mode freed ([0-9.]+) GiB")
REFUSED_FLAG = "--prefill-num-servers"


def smoke_command(folder: Path, name: str, gpus: int, flags: Sequence[str]) -> list[str]:
    """A job of `STEPS` batches, with the example's model and prompts in `folder/example`."""
    always = ["--save-interval", str(STEPS // 2), *precision_flags(gpus)]
    if gpus:
        always += ["--vllm-enforce-eager", "--vllm-gpu-memory-utilization", str(FREE_SHARE)]
        always += ["--vllm-kv-cache-memory-bytes", str(CACHE_BYTES)]
    return [*train_command(folder / "example", folder / name, STEPS, 0), *always, *flags]


def ppo_flags(gpus: int) -> list[str]:
    """A critic, and a trainer that leaves its device between batches; on one GPU the engine does so, too."""
    turns = COLOCATE if gpus == 1 else ("--offload-train",)
    return ["--advantage-estimator", "ppo", "--num-critic-only-steps", "1", *turns]


def external_flags(folder: Path, mode: str, address: str) -> list[str]:
    """Publications through a folder into an engine that someone else started at `address`, a base URL."""
    flags = {
        "--rollout-external-engine-addrs": address.removeprefix("http://"),
        "--update-weight-transport": "disk",
        "--update-weight-mode": mode,
        "--update-weight-disk-dir": folder / f"{mode}_versions",
        "--update-weight-local-checkpoint-dir": folder / f"{mode}_copy",
        "--flush-cache-interval": 1,
    }
    return [str(word) for item in flags.items() for word in item]


def job_values(job: Job, name: str) -> dict[str, float]:
    """Run a job to its end and check what it has left; its values.

    Raises `RunFailedError` when it fails, or fails a check.
    """
    shutil.rmtree(job.run, ignore_errors=True)
    job.log.unlink(missing_ok=True)
    job.to_end()
    records = list(read_steps(job.run).values())
    check_records(name, records)
    report = audit_run(job.run)
    if report.lost or report.trained_twice or not report.identity_holds:
        raise RunFailedError(f"{name}: the groups don't add up: {report}.", next_step=f"Look at {job.run}.")
    values = {
        "reward": records[-1]["reward_mean"],
        "loss": records[-1]["train"]["loss"],
        "step_s": statistics.median(record["step_s"] for record in records),
        "lost": len(report.lost),
        "trained_twice": len(report.trained_twice),
    }
    if means := job.parity_means():  # none on stand-ins, with which no trainer agrees
        values["parity_mean"] = means[-1]
    return {f"{name}_{value}": number for value, number in values.items()}


def check_records(name: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Raise `RunFailedError` unless every batch was trained, under the version that was due, with finite numbers."""
    versions = [record["policy_version"] for record in records]
    if versions != list(range(1, STEPS + 1)):
        raise RunFailedError(f"{name}: batches of the versions {versions}, expected: 1 to {STEPS}.")
    for record in records:
        reported = {"reward_mean": record["reward_mean"], **record["train"]}
        bad = {key: value for key, value in reported.items() if not math.isfinite(value)}
        if bad:
            raise RunFailedError(f"{name}: rollout {record['rollout_id']} reported {bad}, expected: finite numbers.")


def colocated(stages: Stages) -> dict[str, float]:
    """Sleep and wake around every batch."""
    job = stages.job("colocated", smoke_command(stages.folder, "colocated", stages.gpus, COLOCATE))
    values = job_values(job, "colocated")
    freed = [float(gib) for gib in SLEPT.findall((job.run / "logs" / "engine_0.log").read_text())]
    if stages.gpus and len(freed) < STEPS:
        raise RunFailedError(f"colocated: the engine slept {len(freed)} times in {STEPS} batches.")
    return values | {"colocated_freed_gib": min(freed, default=0.0)}


def ppo(stages: Stages) -> dict[str, float]:
    """Actor and critic."""
    job = stages.job("ppo", smoke_command(stages.folder, "ppo", stages.gpus, ppo_flags(stages.gpus)))
    values = job_values(job, "ppo")
    return values | {"ppo_value_loss": value_loss(job)}


def value_loss(job: Job) -> float:
    """Of the last step; raises `RunFailedError` unless the first batch has trained the critic alone and others both."""
    warm, *later = [record["train"] for record in read_steps(job.run).values()]
    if "loss" in warm or any("value_loss" not in step for step in (warm, *later)):
        raise RunFailedError(f"ppo: the first batch trains the critic alone and later ones both, found {warm}, {later}")
    return float(later[-1]["value_loss"])


class ExternalEngine:
    """An engine that no job starts or stops, started when the first of them needs it."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._stack = ExitStack()
        self._address: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def serve(self, mode: str) -> dict[str, float]:
        """Run one job on it; "full" or "delta"."""
        folder, gpus = self._stages.folder, self._stages.gpus
        for left in ("versions", "copy"):
            shutil.rmtree(folder / f"{mode}_{left}", ignore_errors=True)
        address = self._started()
        job = self._stages.job(mode, smoke_command(folder, mode, gpus, external_flags(folder, mode, address)))
        found = job_values(job, mode)
        records = list(read_steps(job.run).values())[:-1]  # nothing is published after the last
        asyncio.run(_check_left(address, mode))
        return found | {f"{mode}_bytes": statistics.median(record["update_weights_wire_bytes"] for record in records)}

    def _started(self) -> str:
        if self._address is None:
            model, gpus = self._stages.folder / "example" / "model", self._stages.gpus
            cache = ("--kv-cache-memory-bytes", str(CACHE_BYTES)) if gpus else ()
            launch = engine_launch(model, gpus, max_model_len=64, name="external", gpu_share=FREE_SHARE, extra=cache)
            self._address = self._stack.enter_context(ready_engine(launch, gpus)).address
        return self._address


async def _check_left(address: str, mode: str) -> None:
    """Raise `RunFailedError` unless the engine still serves, the last version that the job published."""
    async with EngineClient(address) as engine:
        version, is_paused = await engine.weight_version(), await engine.is_paused()
        if version != STEPS or is_paused:
            raise RunFailedError(
                f"{mode}: the job left its engine with version {version}{', paused' if is_paused else ''}; "
                f"expected: {STEPS}, serving."
            )


def prefill(stages: Stages) -> dict[str, float]:
    """Prefill engines are refused by name. Raises `RunFailedError` when they aren't."""
    command = smoke_command(stages.folder, "prefill", stages.gpus, [REFUSED_FLAG, "1"])
    done = subprocess.run(command, capture_output=True, text=True, timeout=120.0, check=False, cwd=REPOSITORY)
    if done.returncode != ExitCode.USER or REFUSED_FLAG not in done.stderr or (stages.folder / "prefill").exists():
        raise RunFailedError(
            f"{REFUSED_FLAG} 1 ended with status {done.returncode}, expected: {ExitCode.USER.value} and a refusal by "
            f"name, found:\n{done.stdout[-1000:]}{done.stderr[-2000:]}"
        )
    return {"prefill_refused": 1.0}


def measure(stages: Stages) -> dict[str, float]:
    """Every value."""
    prepare_example(stages.folder)
    found: dict[str, float] = {}
    if stages.wants("prefill"):
        found |= stages.once("prefill", partial(prefill, stages), needs_s=30)
    for job in (colocated, ppo):
        if stages.wants(job.__name__):
            found |= stages.once(job.__name__, partial(job, stages), needs_s=100)
    with ExternalEngine(stages) as engine:
        for mode in ("full", "delta") if stages.wants("external") else ():
            found |= stages.once(mode, partial(engine.serve, mode), needs_s=110)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    return run_part(Part("smokes", DESCRIPTION.replace("STEPS", str(STEPS)), measure, choices=CHOICES), argv)


if __name__ == "__main__":
    raise SystemExit(main())
