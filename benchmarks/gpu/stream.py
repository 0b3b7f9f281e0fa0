"""The stream against its ceilings: trained tokens/s over what generation and training do alone on the same devices."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.engines import GRAPHS, QWEN3_06B, engine_launch, ready_engine
from benchmarks.gpu.jobs import ONE_GPU_SHARE, device_flags, steady, train_words
from benchmarks.gpu.part import Part, Stages, run_part
from tests.support.tiny_models import CHARACTERS, build_tiny_qwen3
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.protocol import GenerateRequest, Sampling
from vime.cli.demo_report import read_steps

DESCRIPTION = """\
Trains a Qwen3 with random weights by `vime train`, a publication after every step, once as a stream and once with
samples of the present weights alone (--max-staleness 0: generation and training in turn). Before that one engine
generates alone, the same requests as many at once. So at each of these balances, by which a name begins:

  (none)          prompts of 64 tokens, responses of 512, 256 requests in flight, steps of 65,536 response tokens: the
                  set-up in which TRL 1.16's AsyncGRPO with vLLM 0.26.0 trained PEER tokens/s on two H200s; --only peer
  long_answers    responses of 2,048 tokens, 64 in flight: generation is the slower side
  long_prompts    prompts of 1,024 tokens, responses of 256: training is the slower side

  stream_tokens_per_s         response tokens trained in a second, over all steady steps: where generation is the slower
                              side, samples come in waves, and quick steps follow slow ones
  turns_tokens_per_s          the same with --max-staleness 0
  generation_tokens_per_s     of the engine alone, with the log-probability of each token
  training_tokens_per_s       response tokens in a second of training itself, median over the steps of the turns
  stream_over_slower          stream / min(generation, training); floor 0.85, goal 0.95
  stream_over_turns           stream / turns
  turns_ceiling               (g + t) / max(g, t), of the times that generation and training of a step take alone
  ceiling_share               stream_over_turns / turns_ceiling; goal 0.9
  trainer_idle_share          of the stream's steady steps
  publish_s, pause_s          medians of the stream's steps: what the trainer waits for a publication, and the engine's
                              pause in it
  publication_s               the same of a whole publication, which may go on while the next batch trains
  parity_mean                 trainer against engine at the start, mean absolute difference of log-probabilities
  stream_over_peer            stream / PEER, of the peer's set-up; goal 1.5 on two H200s
"""
PEER_TOKENS_PER_S = 17759


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


SMALL_MODEL = {"vocab_size": 1024, "max_position_embeddings": 512}
SMALL = Load(SMALL_MODEL, 16, 32, 4, 8, 32, 1024, 6)
FULL = Load(QWEN3_06B, 64, 512, 8, 16, 256, 16384, 12)
PEER = "peer"
BALANCES: Mapping[str, tuple[Load, Load]] = {
    PEER: (FULL, SMALL),
    "long_answers": (Load(QWEN3_06B, 64, 2048, 8, 4, 64, 16384, 8), Load(SMALL_MODEL, 16, 96, 4, 2, 8, 1024, 5)),
    "long_prompts": (Load(QWEN3_06B, 1024, 256, 8, 16, 256, 16384, 8), Load(SMALL_MODEL, 128, 16, 4, 8, 32, 1024, 5)),
}
"""By name: on GPUs, and in small."""
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
    if not (folder / "model" / "tokenizer_config.json").exists():  # written last
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


async def generation_rate(address: str, load: Load, num_requests: int) -> float:
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
    launch = engine_launch(
        folder / "model",
        gpus,
        max_model_len=load.prompt_tokens + load.response_tokens,
        name="alone",
        gpu_share=ONE_GPU_SHARE if gpus == 1 else None,
    )
    with ready_engine(launch, gpus) as server:
        return asyncio.run(generation_rate(server.address, load, 2 * load.groups * load.group))


def _median(records: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.median(record[name] for record in steady(records))


def _rate(records: Sequence[dict[str, Any]]) -> float:
    """Response tokens in a second of all steady steps together."""
    return sum(map(_tokens, steady(records))) / sum(record["step_s"] for record in steady(records))


def _tokens(record: dict[str, Any]) -> float:
    """Response tokens of a step."""
    return float(record["trained_tokens_per_s"] * record["step_s"])


def summarize(stream: Sequence[dict[str, Any]], turns: Sequence[dict[str, Any]], generation: float) -> dict[str, float]:
    """Values of the report from the records of both jobs."""
    training = statistics.median(_tokens(record) / record["train_s"] for record in steady(turns))
    g, t = 1 / generation, 1 / training
    streaming, taking_turns = _rate(stream), _rate(turns)
    ceiling = (g + t) / max(g, t)
    waited = sum(record["wait_s"] for record in steady(stream))
    return {
        "stream_tokens_per_s": streaming,
        "turns_tokens_per_s": taking_turns,
        "generation_tokens_per_s": generation,
        "training_tokens_per_s": training,
        "stream_over_slower": streaming / min(generation, training),
        "stream_over_turns": streaming / taking_turns,
        "turns_ceiling": ceiling,
        "ceiling_share": streaming / taking_turns / ceiling,
        "trainer_idle_share": waited / sum(record["step_s"] for record in steady(stream)),
        "publish_s": _median(stream, "publish_s"),
        "publication_s": _median(stream, "publication_s"),
        "pause_s": _median(stream, "pause_s"),
    }


def measure_balance(stages: Stages, name: str) -> dict[str, float]:
    """Both jobs and the engine alone, at one balance."""
    load, gpus = BALANCES[name][stages.small], stages.gpus
    folder = stages.folder if name == PEER else stages.folder / name
    if folder != stages.folder and not folder.exists():
        folder.mkdir()
        (folder / "model").symlink_to(stages.folder / "model")
    prepare(stages.folder, BALANCES[PEER][stages.small])
    prepare(folder, load)

    def stage(what: str) -> str:
        return what if name == PEER else f"{name}_{what}"

    def trained(what: str, flags: Sequence[str]) -> dict[str, float]:
        job = stages.job(stage(what), [*train_command(folder, stages.folder / stage(what), load, gpus), *flags])
        if len(read_steps(job.run)) < load.steps:
            # What is measured is the steps; a commit of the whole model would only take time.
            job.killed_after(load.steps)
        return {"parity_mean": job.parity_means()[-1]}

    alone = stages.once(stage("alone"), lambda: {"tokens_per_s": generation_alone(folder, load, gpus)}, needs_s=80)
    streaming = stages.once(stage("stream"), lambda: trained("stream", ()), needs_s=110)
    stages.once(stage("turns"), lambda: trained("turns", ("--max-staleness", "0")), needs_s=120)
    stream, turns = (list(read_steps(stages.folder / stage(what)).values()) for what in ("stream", "turns"))
    values = summarize(stream, turns, alone["tokens_per_s"]) | streaming
    if name == PEER:
        return values | {"stream_over_peer": values["stream_tokens_per_s"] / PEER_TOKENS_PER_S}
    return {f"{name}_{value}": number for value, number in values.items()}


def measure(stages: Stages) -> dict[str, float]:
    """Every balance that is wanted, one after the other."""
    found: dict[str, float] = {}
    for name in stages.only or BALANCES:
        found |= measure_balance(stages, name)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    words = DESCRIPTION.replace("PEER", f"{PEER_TOKENS_PER_S:,}")
    return run_part(Part("stream", words, measure, choices=tuple(BALANCES)), argv)


if __name__ == "__main__":
    raise SystemExit(main())
