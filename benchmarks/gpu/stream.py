"""The stream against its ceilings: trained tokens/s over what generation and training do alone on the same devices."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import (
    HEAD,
    ONE_GPU_SHARE,
    Job,
    describe_devices,
    device_flags,
    num_gpus,
    steady,
    train_words,
    without_folder,
)
from benchmarks.report import benchmark_parser, build_report, print_report
from tests.support.tiny_models import CHARACTERS, build_tiny_qwen3
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.launch import EngineLaunch
from vime.backends.vllm_utils.protocol import GenerateRequest, Sampling
from vime.backends.vllm_utils.server import EngineServer
from vime.cli.demo_report import read_steps
from vime.errors import VimeError

DESCRIPTION = """\
Trains a Qwen3 with random weights by `vime train` on prompts of PROMPT tokens with long responses, a publication after
every step, once as a stream and once with samples of the present weights alone (--max-staleness 0: generation and
training in turn). Before that one engine generates alone, the same requests as many at once.

  stream_tokens_per_s         response tokens trained in a second of the whole step, median of the steady steps
  turns_tokens_per_s          the same with --max-staleness 0
  generation_tokens_per_s     of the engine alone, with the log-probability of each token
  training_tokens_per_s       response tokens in a second of training itself, median over the steps of the turns
  stream_over_slower          stream / min(generation, training); floor 0.85, goal 0.95
  stream_over_turns           stream / turns
  turns_ceiling               (g + t) / max(g, t), of the times that generation and training of a step take alone
  trainer_idle_share          of the stream's steady steps
  publish_s, pause_s          medians of the stream's steps: a whole publication, and the engine's pause in it
  parity_mean                 trainer against engine at the start, mean absolute difference of log-probabilities
"""


@dataclass(frozen=True)
class Load:
    """A model's shape and how much is asked of it."""

    model: dict[str, Any]
    prompt_tokens: int
    response_tokens: int
    group: int
    """Samples of a prompt."""
    groups: int
    """Prompts of a step."""
    requests: int
    """In flight at the engine."""
    tokens_per_microbatch: int
    steps: int


SMALL = Load({"vocab_size": 1024, "max_position_embeddings": 512}, 16, 32, 4, 8, 32, 1024, 6)
QWEN3_06B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
FULL = Load(QWEN3_06B, 64, 512, 8, 16, 256, 16384, 12)
"""Steps of 65,536 response tokens."""
GRAPHS = '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'
"""`--compilation-config` of the engine on a GPU: the fastest of a small model, and ready in half the time."""
NUM_PROMPTS = 4096
_IDS = itertools.count()


async def reward(_args: Any, sample: Any) -> float:
    """A reward that differs between samples and costs nothing: the share of even tokens."""
    tokens = sample.tokens[-sample.response_length :]
    return sum(token % 2 == 0 for token in tokens) / max(1, len(tokens))


def prepare(folder: Path, load: Load) -> None:
    """Model and prompts; what is there stays."""
    if (folder / "prompts.jsonl").exists():
        return
    build_tiny_qwen3(folder / "model", **load.model)
    rng = random.Random(0)
    lines = [
        json.dumps({"input": "".join(rng.choices(CHARACTERS, k=load.prompt_tokens)), "label": ""})
        for _ in range(NUM_PROMPTS)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def train_command(folder: Path, run: Path, load: Load, gpus: int) -> list[str]:
    """The job."""
    flags = {
        "--hf-checkpoint": folder / "model",
        "--prompt-data": folder / "prompts.jsonl",
        "--label-key": "label",
        "--custom-rm-path": "benchmarks.gpu.stream.reward",
        "--num-rollout": 2 * load.steps,
        "--rollout-batch-size": load.groups,
        "--n-samples-per-prompt": load.group,
        "--rollout-max-response-len": load.response_tokens,
        "--vllm-server-concurrency": load.requests,
        "--vllm-max-model-len": load.prompt_tokens + load.response_tokens,
        "--lr": 1e-6,
        "--max-tokens-per-gpu": load.tokens_per_microbatch,
        "--actor-num-gpus-per-node": 1,
        "--rollout-num-gpus": 1,
        "--rollout-data-transport": "straw",
        "--save": run,
        "--save-interval": 2 * load.steps,
        "--flush-cache-interval": 0,
        "--rollout-queue-max-groups": 2 * load.groups + load.requests // load.group,
    }
    if gpus:
        flags["--vllm-compilation-config"] = GRAPHS
    switches = ["--use-rollout-logprobs", "--calculate-per-token-loss", "--use-dynamic-batch-size"]
    return [*train_words(), *[str(word) for item in flags.items() for word in item], *switches, *device_flags(gpus)]


async def _generate(address: str, load: Load, num_requests: int) -> float:
    """Response tokens/s of an engine that has nothing else to do; the first requests warm it up."""
    rng = random.Random(1)
    async with EngineClient(address) as client:
        gate = asyncio.Semaphore(load.requests)

        async def one() -> int:
            prompt = [rng.randrange(3, 3 + len(CHARACTERS)) for _ in range(load.prompt_tokens)]
            async with gate:
                sampling = Sampling(load.response_tokens, ignore_eos=True)
                return len((await client.generate(GenerateRequest(f"alone-{next(_IDS)}", prompt, sampling))).token_ids)

        await asyncio.gather(*[one() for _ in range(load.requests)])
        started = time.perf_counter()
        tokens = sum(await asyncio.gather(*[one() for _ in range(num_requests)]))
        return tokens / (time.perf_counter() - started)


def generation_alone(folder: Path, load: Load, gpus: int) -> float:
    """Start an engine as the job would, and measure it."""
    extra = ["--gpu-memory-utilization", str(ONE_GPU_SHARE)] if gpus == 1 else []
    launch = EngineLaunch(
        folder / "model",
        "127.0.0.1",
        0,
        folder / "alone.log",
        "stream",
        max_model_len=load.prompt_tokens + load.response_tokens,
        device="gpu" if gpus else "cpu",
        dtype="bfloat16" if gpus else None,
        extra_args=(*extra, "--hf-overrides", HEAD, "--compilation-config", GRAPHS) if gpus else (),
    )
    with ExitStack() as stack:
        server = stack.enter_context(EngineServer(launch))
        server.wait_ready()
        return asyncio.run(_generate(server.address, load, 2 * load.groups * load.group))


def _median(records: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.median(record[name] for record in steady(records))


def _tokens(record: dict[str, Any]) -> float:
    """Response tokens of a step."""
    return float(record["trained_tokens_per_s"] * record["step_s"])


def summarize(stream: Sequence[dict[str, Any]], turns: Sequence[dict[str, Any]], generation: float) -> dict[str, float]:
    """Values of the report from the records of both jobs."""
    training = statistics.median(_tokens(record) / record["train_s"] for record in steady(turns))
    g, t = 1 / generation, 1 / training
    streaming, taking_turns = _median(stream, "trained_tokens_per_s"), _median(turns, "trained_tokens_per_s")
    waited = sum(record["wait_s"] for record in steady(stream))
    return {
        "stream_tokens_per_s": streaming,
        "turns_tokens_per_s": taking_turns,
        "generation_tokens_per_s": generation,
        "training_tokens_per_s": training,
        "stream_over_slower": streaming / min(generation, training),
        "stream_over_turns": streaming / taking_turns,
        "turns_ceiling": (g + t) / max(g, t),
        "trainer_idle_share": waited / sum(record["step_s"] for record in steady(stream)),
        "publish_s": _median(stream, "publish_s"),
        "pause_s": _median(stream, "pause_s"),
    }


def run(folder: Path, load: Load, more: Sequence[str]) -> dict[str, list[float]]:
    """Both jobs and the engine alone; a job that ended before is not repeated."""
    gpus = num_gpus()
    prepare(folder, load)
    generation = generation_alone(folder, load, gpus)
    records: dict[str, list[dict[str, Any]]] = {}
    parity: list[float] = []
    for name, flags in (("stream", ()), ("turns", ("--max-staleness", "0"))):
        command = [*train_command(folder, folder / name, load, gpus), *flags, *more]
        job = Job(command, folder / name, folder / f"{name}.log")
        if len(read_steps(folder / name)) < load.steps:
            # What is measured is the steps; a commit of the whole model would only take time.
            job.killed_after(load.steps)
        records[name] = list(read_steps(folder / name).values())
        parity.append(job.parity_means()[-1])
    values = summarize(records["stream"], records["turns"], generation) | {"parity_mean": parity[0]}
    return {name: [value] for name, value in values.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status. Flags that it doesn't know go to `vime train`."""
    parser = benchmark_parser("gpu.stream", DESCRIPTION, repeats=1)
    parser.add_argument("--folder", type=Path, help="where runs and logs stay; a new temporary folder when left out")
    options, more = parser.parse_known_args(argv)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="vime-stream-"))
    small = options.quick or not num_gpus()
    try:
        values = run(folder, SMALL if small else FULL, more)
    except VimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    packages = ["vllm", "torch", "megatron-core", "ray"]
    report = build_report("gpu.stream", values, argv=without_folder(argv), packages=packages, folder=folder)
    report["machine"] |= describe_devices()
    print_report(report, only_json=options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
