"""What it costs on these devices to return what a sample needs: by the engine, and through producers and queue."""

from __future__ import annotations

import re
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks import sample_path
from benchmarks.gpu import stream
from benchmarks.gpu.engines import QWEN3_MOE, SMALL_MOE, engine_launch, model_in, ready_engine
from benchmarks.gpu.part import Part, Stages, run_part
from vime.backends.vllm_utils.protocol import SampleColumns
from vime.backends.vllm_utils.server import EngineServer

DESCRIPTION = """\
Samples from Qwen3-0.6B and from a mixture of experts of 1.6 billion parameters, with random weights: first from engines
that are asked directly, as `python -m benchmarks.sample_path` does, then by `vime train --debug-rollout-only`, whose
producers check, score and store every sample in the queue on disk. All in tokens/s, or ratios of the same call:

  tokens_per_s_none                 tokens alone, by vLLM's own route
  logprob_ratio                     vime's route over that, with the sampler's log-probabilities; floor 0.80, goal 0.95
  head_ratio                        the same with the HEAD most probable tokens, too; floor 0.75, goal 0.90
  stock_logprob_ratio, stock_head_ratio
                                    vLLM's own JSON route over it; head_over_stock is head / stock_head
  routes_ratio                      of the mixture of experts: with the routes of every token over tokens alone
  queued_tokens_per_s_logprob, queued_tokens_per_s_head, queued_tokens_per_s_routes
                                    through producers and queue, engine and all
  queued_head_over_logprob          a ratio of them

--only chooses among what an engine is asked (heads of the dense model, routes of the other) and each queued side.
"""
REPEATS = 5
NUM_TOKENS, SMALL_TOKENS = 256, 16
STOCK_HEAD_SHARE = 16
"""vLLM's own route with the head, forty times slower than the others, gets one part in so many of the tokens."""
TWO_ENGINES_SHARE = 0.4
"""Part of a GPU's memory for each of two engines."""
SIDES: Mapping[str, tuple[str, ...]] = {
    "logprob": (),
    "head": ("--use-score-centering", "--score-centering-top-k", str(sample_path.HEAD)),
    "routes": ("--use-rollout-routing-replay",),
}
"""Flags of the job by what it stores of each token."""
_ROLLOUT = re.compile(r"rollout (\d+)/\d+ ")


def side_command(folder: Path, side: str, load: stream.Load, gpus: int) -> list[str]:
    """The job that stores it."""
    command = stream.train_command(folder, folder / side, load, gpus)
    alone = ["--debug-rollout-only", "--flush-cache-interval", "1", "--num-rollout", "10000"]  # nothing is published
    return [*command, *alone, *SIDES[side]]


def queued_tokens_per_s(stages: Stages, side: str) -> dict[str, float]:
    """Tokens/s of the groups that come out of the queue, once it flows."""
    load = stream.SMALL if stages.small else stream.FULL
    folder = stages.folder / ("experts_job" if side == "routes" else "dense_job")
    model = (SMALL_MOE if stages.small else QWEN3_MOE) if side == "routes" else load.model
    stream.prepare(folder, replace(load, model=model))
    job = stages.job(side, side_command(folder, side, load, stages.gpus))
    shutil.rmtree(folder / side, ignore_errors=True)  # what an earlier call has left waits in its queue
    job.log.unlink(missing_ok=True)

    def done() -> int:
        return max((int(found[1]) for found in _ROLLOUT.finditer(job.log.read_text(errors="replace"))), default=0)

    with job.running() as running:
        running.until(lambda: done() >= 2)
        first, started = done(), time.perf_counter()
        running.until(lambda: done() >= first + load.steps)
        batches, seconds = done() - first, time.perf_counter() - started
    return {f"queued_tokens_per_s_{side}": batches * load.groups * load.group * load.response_tokens / seconds}


@contextmanager
def _engine(
    stages: Stages, share: float | None, model: Path, name: str, columns: SampleColumns
) -> Iterator[EngineServer]:
    launch = engine_launch(
        model,
        stages.gpus,
        max_model_len=sample_path.MAX_MODEL_LEN,
        name=name,
        gpu_share=share,
        columns=columns,
        extra=sample_path.ENGINE_ARGS,
    )
    with ready_engine(launch, stages.gpus) as server:
        yield server


def _medians(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(numbers) for name, numbers in values.items()}


def measure(stages: Stages) -> dict[str, float]:
    """Every value."""
    tokens = SMALL_TOKENS if stages.small else NUM_TOKENS

    def heads() -> dict[str, float]:
        model = model_in(stages.folder / "dense", small=stages.small)
        start = partial(_engine, stages, None)
        return _medians(sample_path.run_heads(start, model, tokens, REPEATS, STOCK_HEAD_SHARE))

    def routes() -> dict[str, float]:
        model = model_in(stages.folder / "experts", small=stages.small, experts=True)
        return _medians(sample_path.run_routes(partial(_engine, stages, TWO_ENGINES_SHARE), model, tokens, REPEATS))

    work: dict[str, tuple[Callable[[], dict[str, float]], float]] = {"heads": (heads, 150), "routes": (routes, 180)}
    work |= {queued(side): (partial(queued_tokens_per_s, stages, side), 95) for side in SIDES}
    found: dict[str, float] = {}
    for name, (stage, needs_s) in work.items():
        if stages.wants(name):
            found |= stages.once(name, stage, needs_s=needs_s)
    if stages.wants(queued("head")) and stages.wants(queued("logprob")):
        ratio = found["queued_tokens_per_s_head"] / found["queued_tokens_per_s_logprob"]
        found["queued_head_over_logprob"] = ratio
    return found


def queued(side: str) -> str:
    """The stage through producers and queue."""
    return f"queued_{side}"


CHOICES = ("heads", "routes", *map(queued, SIDES))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    words = DESCRIPTION.replace("HEAD", str(sample_path.HEAD))
    packages = ("vllm", "torch", "ray", "straw-queue")
    return run_part(Part("sample_path", words, measure, packages, CHOICES), argv)


if __name__ == "__main__":
    raise SystemExit(main())
