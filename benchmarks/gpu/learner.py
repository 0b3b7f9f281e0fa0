"""One rank's optimizer step on packed sequences: its speed, its memory, and what replaying routes adds."""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.engines import model_in
from benchmarks.gpu.kernels import seconds_by_kind
from benchmarks.gpu.part import Part, Stages, run_part
from benchmarks.gpu.programs import medians_of
from tests.vime.backends.megatron_utils.tiny_batches import Sequence_, pack, totals
from tests.vime.backends.megatron_utils.tiny_recorded import with_routes
from vime.backends.megatron_utils.config import TrainerConfig
from vime.backends.megatron_utils.trainer import MegatronTrainer
from vime.models.families import num_experts

DESCRIPTION = """\
Takes optimizer steps of one rank, each on one packed microbatch of sequences of LENGTH tokens (small: SHORT), in bf16
on a GPU. The dense model is Qwen3-0.6B, the mixture of experts has 1.6 billion parameters and chooses 8 of 128 experts
for a token. SIZE is 8k and 32k tokens (small: 256 and 1,024 under the same names). Medians of REPEATS steps:

  step_s_SIZE, tokens_per_s_SIZE     of the dense model, forward and backward pass and optimizer
  peak_gib_SIZE                      of torch's allocator, model and optimizer included; 0 on a CPU
  tflops_SIZE                        of the model alone: what is computed twice counts once
  utilisation_SIZE                   that over matmul_tflops, what a plain matrix product does in the same call
  mfu_SIZE                           that over what the maker says of the GPU; 0 where it isn't known
  products_s_SIZE, attention_s_SIZE, copies_s_SIZE, rest_s_SIZE
                                     of one profiled step: kernels that multiply matrices, those of attention, copies,
                                     and all others; --folder keeps a table of the longest, profile_SIZE.txt
  busy_SIZE                          their sum over step_s_SIZE: below 1 the GPU waits for the processor
  moe_step_s, moe_replay_step_s      of the mixture of experts with 8k tokens: its own routes, and those of a sampler
  replay_over_own                    the second over the first
  head_...                           what `python -m benchmarks.logprob_memory` measures: memory and time of
                                     log-probabilities, entropy and score centering, over a dense head
"""
LENGTH, SHORT = 2048, 64
SIZES: Mapping[str, tuple[int, int]] = {"8k": (8192, 256), "32k": (32768, 1024)}
"""Packed tokens, and in small."""
PROMPT_SHARE = 8
"""One part in so many of a sequence is its prompt."""
REPEATS, WARM_UP = 5, 2
PEAK_TFLOPS = {"NVIDIA H200": 989.0, "NVIDIA H100 80GB HBM3": 989.0, "NVIDIA A100-SXM4-80GB": 312.0}
"""Dense products in bf16, from the data sheets."""


def make_sequences(num_tokens: int, length: int, vocab_size: int) -> list[Sequence_]:
    """Random sequences of equal length, `num_tokens` in all."""
    rng = np.random.default_rng(0)
    response = length - length // PROMPT_SHARE
    return [
        Sequence_(
            index=index,
            rollout=index,
            tokens=rng.integers(3, vocab_size, length).astype(np.int32),
            loss_mask=np.ones(response, np.uint8),
            sampler_log_probs=np.full(response, -np.log(vocab_size), np.float32),
            advantage=float(rng.normal()),
        )
        for index in range(num_tokens // length)
    ]


def step_flops(shape: Mapping[str, Any], sequences: Sequence[Sequence_]) -> float:
    """Floating-point operations of a step of a model with such a `config.json`: 2 a multiplication with a weight, three
    times, for the forward pass and both parts of the backward pass. The head is multiplied with response tokens alone;
    attention is causal.
    """
    hidden, heads, width = shape["hidden_size"], shape["num_attention_heads"], shape["head_dim"]
    attention = hidden * width * 2 * (heads + shape["num_key_value_heads"])
    experts = shape.get("num_experts_per_tok", 0)
    feed_forward = 3 * hidden * (experts * shape["moe_intermediate_size"] if experts else shape["intermediate_size"])
    router = hidden * num_experts(shape) if experts else 0
    layers = shape["num_hidden_layers"] * (attention + feed_forward + router)
    lengths = np.array([len(item.tokens) for item in sequences], np.float64)
    scores = shape["num_hidden_layers"] * heads * width * float((lengths**2).sum())  # two products of half a square
    responses = sum(item.response_length for item in sequences)
    return 3 * (2 * layers * float(lengths.sum()) + 2 * hidden * shape["vocab_size"] * responses + 2 * scores)


def matmul_tflops(gpus: int, size: int) -> float:
    """The best of some plain square products, in the dtype that the step computes in."""
    device, dtype = ("cuda", torch.bfloat16) if gpus else ("cpu", torch.float32)
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(10):
        started = _now()
        torch.mm(one, other)
        seconds.append(_now() - started)
    return float(2 * size**3 / min(seconds) / 1e12)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Learner:
    """One rank's trainer, and a batch that it takes step after step on."""

    def __init__(self, trainer: MegatronTrainer, sequences: Sequence[Sequence_], shape: Mapping[str, Any]) -> None:
        self._trainer, self._totals = trainer, totals(sequences)
        self._batch = pack(sequences, range(len(sequences)))
        if "num_experts_per_tok" in shape:
            sizes = shape["num_hidden_layers"], num_experts(shape), shape["num_experts_per_tok"]
            self._batch = with_routes(self._batch, *sizes)

    def step_s(self) -> float:
        """Seconds of one step."""
        started = _now()
        self._trainer.train_step([self._batch], self._totals)
        return _now() - started


def steps_of(stages: Stages, name: str, model: Path, num_tokens: int, *, replays: bool = False) -> dict[str, float]:
    """One trainer's median time of a step, its peak of memory, and how long the kernels of a step take, by kind."""
    shape = json.loads((model / "config.json").read_text())
    sequences = make_sequences(num_tokens, SHORT if stages.small else LENGTH, shape["vocab_size"])
    config = TrainerConfig(
        hf_checkpoint=model,
        precision="bf16" if stages.gpus else "fp32",
        global_batch_size=len(sequences),
        replay_routes=replays,
    )
    gc.collect()  # an earlier trainer's cycles hold its memory
    meeting = stages.folder / f"meeting_{name}_{time.monotonic_ns()}"
    with MegatronTrainer(config, 0, 1, f"file://{meeting}") as trainer:
        trainer.load_hf()
        learner = Learner(trainer, sequences, shape)
        if stages.gpus:
            torch.cuda.reset_peak_memory_stats()
        seconds = statistics.median([learner.step_s() for _ in range(WARM_UP + REPEATS)][WARM_UP:])
        peak_gib = torch.cuda.max_memory_allocated() / 2**30 if stages.gpus else 0.0
        kinds = seconds_by_kind(learner.step_s, stages.folder / f"profile_{name}.txt")
    found = {"step_s": seconds, "peak_gib": peak_gib, "flops": step_flops(shape, sequences)}
    return found | {f"{kind}_s": kind_s for kind, kind_s in kinds.items()} | {"busy": sum(kinds.values()) / seconds}


def sized(stages: Stages, size: str, matmul: float) -> dict[str, float]:
    """Every value of one size of the dense model."""
    num_tokens = SIZES[size][stages.small]
    found = steps_of(stages, size, model_in(stages.folder / "dense", small=stages.small), num_tokens)
    peak = PEAK_TFLOPS.get(torch.cuda.get_device_name()) if stages.gpus else None
    tflops = found.pop("flops") / found["step_s"] / 1e12
    values = found | {
        "tokens_per_s": num_tokens / found["step_s"],
        "tflops": tflops,
        "utilisation": tflops / matmul,
        "mfu": tflops / peak if peak else 0.0,
    }
    return {f"{name}_{size}": value for name, value in values.items()}


def replayed(stages: Stages) -> dict[str, float]:
    """Steps of the mixture of experts without and with the sampler's routes."""
    model = model_in(stages.folder / "experts", small=stages.small, experts=True)
    num_tokens = SIZES["8k"][stages.small]
    own = steps_of(stages, "own", model, num_tokens)["step_s"]
    replay = steps_of(stages, "replay", model, num_tokens, replays=True)["step_s"]
    return {"moe_step_s": own, "moe_replay_step_s": replay, "replay_over_own": replay / own}


def measure(stages: Stages) -> dict[str, float]:
    """Every value."""
    size = 512 if stages.small else 8192
    found = stages.once("matmul", lambda: {"matmul_tflops": matmul_tflops(stages.gpus, size)})
    quick = ["--quick"] if stages.small else []
    for name in SIZES:
        found |= stages.once(name, partial(sized, stages, name, found["matmul_tflops"]), needs_s=50)
    found |= stages.once("replay", lambda: replayed(stages), needs_s=80)
    head = stages.once("head", lambda: medians_of("benchmarks.logprob_memory", quick, stages), needs_s=30)
    return found | {f"head_{name.removeprefix('head_')}": value for name, value in head.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    words = DESCRIPTION.replace("LENGTH", f"{LENGTH:,}").replace("SHORT", str(SHORT)).replace("REPEATS", str(REPEATS))
    return run_part(Part("learner", words, measure, ("torch", "megatron-core")), argv)


if __name__ == "__main__":
    raise SystemExit(main())
