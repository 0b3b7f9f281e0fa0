"""One rank and one engine in bf16: how far from float32, from each other, and what makes them differ more."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch

from benchmarks.gpu.answers import (
    TEMPERATURE,
    Size,
    ask,
    differences,
    k3_gap,
    make_prompts,
    max_gap,
    mean_gap,
    store,
    stored,
)
from benchmarks.gpu.engines import GRAPHS, model_in, ready_engine
from benchmarks.gpu.jobs import HEAD
from benchmarks.gpu.learner import make_sequences
from benchmarks.gpu.part import Part, Stages, run_part
from benchmarks.gpu.update_gaps import MORE_TOKENS, Update
from pipeline.probe_sequence import ProbeSequence
from tests.vime.backends.megatron_utils.tiny_batches import Sequence_, pack, totals
from vime.backends.megatron_utils.config import TrainerConfig
from vime.backends.megatron_utils.trainer import MegatronTrainer
from vime.backends.vllm_utils import server
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.launch import EngineCommand, EngineLaunch, engine_command
from vime.backends.vllm_utils.protocol import NO_COLUMNS, SampleColumns

DESCRIPTION = """\
Compares log-probabilities of the same tokens: Qwen3-0.6B and a mixture of experts of 1.6 billion parameters, with
random weights, temperature TEMPERATURE. One rank trains on the first GPU, one engine samples, on the second where there
are two; both in bf16, on a CPU too (there: tiny models). A gap is the absolute difference of a token's log-probability.

One rank alone:

  bf16_mean, bf16_max          gap of the trainer in bf16 and in float32
  bf16_grad_norm               relative difference of the gradient's norm in their first step
  packed_max, packed_max_fp32  gap of sequences packed together and one by one, in bf16 and in float32

The engine against the trainer; parity_mean is at its best: processed log-probabilities, a head in float32, no prefix
cache, no asynchronous scheduling. What is added when one of that is switched back (adds = gap - parity_mean):

  parity_mean, parity_max      goal 0.02 for the mean
  raw_adds                     log-probabilities before the temperature
  head_adds                    a head in bf16
  cached_adds                  prefix cache and asynchronous scheduling, prompts asked for a second time
  unsalted_adds                the same after a step of the trainer and a publication, without a salt: the cache is that
                               of the weights before
  salted_adds                  with a salt of the version, as vime does it
  kept_adds                    tokens that a request samples after a publication that it lived through: its earlier keys
                               and values are of the weights before
  stale_adds                   its tokens from before it: what an engine that misses a publication adds
  cached_share                 of the prompts that were asked for a second time, those that the cache served

A mixture of experts, without and with the sampler's routes replayed; k3 is the mean over tokens of r - 1 - log r,
r = trainer / sampler:

  moe_max, moe_k3, moe_max_replayed, moe_k3_replayed, moe_max_cut, moe_k3_cut

--only chooses among one rank alone, what freshly started engines sample (sampled), what is around a publication
(updated) and routes.
"""
NO_CACHE = ("--no-enable-prefix-caching", "--no-async-scheduling")
FP32_HEAD = ("--hf-overrides", HEAD)
FULL, SMALL = Size(32, 256, 128), Size(6, 160, 24)
SMALL_STD, STD = 0.08, 0.02
"""Spread of random weights: a tiny model's logits would hardly differ with that of a large one."""
SMALL_LR, LR = 1e-3, 1e-4
"""Of the one step between two publications; larger than in training, so that old keys and values show."""
TRAINER_TOKENS, SMALL_TRAINER_TOKENS = (8192, 512), (256, 32)
"""Tokens in all and of a sequence, for one rank alone."""

Precision = Literal["fp32", "bf16"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")


class Correct:
    """One call: its models, engines and trainers."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self.size = SMALL if stages.small else FULL

    def model(self, *, experts: bool = False) -> Path:
        std = SMALL_STD if self._stages.small else STD
        folder = self._stages.folder / ("experts" if experts else "dense")
        return model_in(folder, small=self._stages.small, experts=experts, init_std=std)

    @contextmanager
    def engine(
        self, name: str, extra: Sequence[str], *, experts: bool = False, columns: SampleColumns = NO_COLUMNS
    ) -> Iterator[str]:
        """Address of a running engine."""
        gpus, size = self._stages.gpus, self.size
        if gpus:
            memory = ("--gpu-memory-utilization", str(FREE_SHARE), "--kv-cache-memory-bytes", str(CACHE_BYTES))
            extra = (*extra, *memory, "--compilation-config", GRAPHS)
        launch = EngineLaunch(
            self.model(experts=experts),
            "127.0.0.1",
            0,
            self._stages.folder / f"{name}.log",
            "benchmark",
            dtype="bfloat16",
            max_model_len=size.prompt_tokens + MORE_TOKENS * size.response_tokens,
            device="gpu" if gpus else "cpu",
            columns=columns,
            extra_args=tuple(extra),
        )
        with ready_engine(launch, gpus) as running:
            yield running.address

    @contextmanager
    def trainer(
        self, *, precision: Precision = "bf16", experts: bool = False, rollouts: int = 1
    ) -> Iterator[MegatronTrainer]:
        """One rank with the model's weights."""
        _free_memory()
        config = TrainerConfig(
            hf_checkpoint=self.model(experts=experts),
            precision=precision,
            temperature=TEMPERATURE,
            lr=SMALL_LR if self._stages.small else LR,
            global_batch_size=rollouts,
            replay_routes=experts,
        )
        meeting = self._stages.folder / f"meeting_{time.monotonic_ns()}"
        with MegatronTrainer(config, 0, 1, f"file://{meeting}") as trainer:
            trainer.load_hf()
            yield trainer
        _free_memory()

    # One rank alone

    def alone(self) -> dict[str, float]:
        """bf16 against float32, packed against one by one."""
        num_tokens, length = SMALL_TRAINER_TOKENS if self._stages.small else TRAINER_TOKENS
        vocab_size = 1024 if self._stages.small else 151936
        sequences = make_sequences(num_tokens, length, vocab_size)
        found = {}
        for precision in PRECISIONS:
            with self.trainer(precision=precision, rollouts=len(sequences)) as trainer:
                found[precision] = scored_and_stepped(trainer, sequences)
        fp32, bf16 = (found[precision] for precision in PRECISIONS)
        gap = np.abs(bf16["together"] - fp32["together"])
        return {
            "bf16_mean": float(gap.mean()),
            "bf16_max": float(gap.max()),
            "bf16_grad_norm": abs(bf16["grad_norm"] / fp32["grad_norm"] - 1),
            "packed_max": float(np.abs(bf16["together"] - bf16["one_by_one"]).max()),
            "packed_max_fp32": float(np.abs(fp32["together"] - fp32["one_by_one"]).max()),
        }

    # The engine against the trainer

    def sampled(self, name: str) -> dict[str, float]:
        """Store what an engine of `ENGINES` samples; its number of tokens."""
        extra, start = ENGINES[name]
        with start(), self.engine(name, extra) as address:
            sequences = asyncio.run(self._ask(address))
        store(self._stages.folder / f"{name}.json", sequences)
        return {f"{name}_tokens": sum(sequence.response_length for sequence in sequences)}

    def scored(self) -> dict[str, float]:
        """Gaps of all that was sampled."""
        with self.trainer() as trainer:
            gaps = {name: differences(trainer, stored(self._stages.folder / f"{name}.json")) for name in ENGINES}
        found = {f"{name}_mean": mean_gap(gap) for name, gap in gaps.items()}
        return found | {"parity_max": max_gap(gaps["parity"])}

    def updated(self) -> dict[str, float]:
        """Gaps around a publication into an engine with prefix cache and asynchronous scheduling."""
        with self.engine("update", FP32_HEAD) as address, self.trainer(rollouts=self.size.prompts) as trainer:
            return asyncio.run(Update(self.size, trainer, self._stages.gpus).measure(address))

    def routes(self) -> dict[str, float]:
        """The mixture of experts, without and with its routes."""
        columns = SampleColumns(routes=True)
        with self.engine("experts", FP32_HEAD, experts=True, columns=columns) as address:
            sequences = asyncio.run(self._ask(address, columns))
        with self.trainer(experts=True) as trainer:
            own, replayed = (differences(trainer, sequences, replay=replay) for replay in (False, True))
        found = {"moe_max": max_gap(own), "moe_k3": k3_gap(own)}
        found |= {"moe_max_replayed": max_gap(replayed), "moe_k3_replayed": k3_gap(replayed)}
        return found | {
            f"moe_{kind}_cut": found[f"moe_{kind}"] / found[f"moe_{kind}_replayed"] for kind in ("max", "k3")
        }

    async def _ask(self, address: str, columns: SampleColumns = NO_COLUMNS) -> list[ProbeSequence]:
        async with EngineClient(address) as client:
            return await ask(client, make_prompts(self.size), self.size.response_tokens, columns=columns)


def scored_and_stepped(trainer: MegatronTrainer, sequences: Sequence[Sequence_]) -> dict[str, Any]:
    """Log-probabilities [R] of all response tokens, packed and one by one, and the norm of a step's gradient."""
    everything = pack(sequences, range(len(sequences)))
    alone = [pack(sequences, [number]) for number in range(len(sequences))]
    return {
        "together": np.concatenate(trainer.log_probs([everything])).astype(np.float64),
        "one_by_one": np.concatenate(trainer.log_probs(alone)).astype(np.float64),
        "grad_norm": trainer.train_step([everything], totals(sequences))["grad_norm"],
    }


@contextmanager
def as_vime_starts_it() -> Iterator[None]:
    yield


@contextmanager
def with_raw_log_probs() -> Iterator[None]:
    """Engines report log-probabilities before the temperature, which no setting of vime lets them do."""

    def command(launch: EngineLaunch) -> EngineCommand:
        made = engine_command(launch)
        argv = tuple(word.replace("processed_logprobs", "raw_logprobs") for word in made.argv)
        return dataclasses.replace(made, argv=argv)

    with mock.patch.object(server, "engine_command", command):
        yield


ENGINES: Mapping[str, tuple[tuple[str, ...], Callable[[], Any]]] = {
    "parity": ((*NO_CACHE, *FP32_HEAD), as_vime_starts_it),
    "raw": ((*NO_CACHE, *FP32_HEAD), with_raw_log_probs),
    "head": (NO_CACHE, as_vime_starts_it),
}
"""Options of vLLM, and how the engine is started."""
SWITCHED = ("raw", "head", "cached", "unsalted", "salted", "kept", "stale")
CHOICES = ("alone", "sampled", "updated", "routes")
CACHE_BYTES = 10 << 30
"""Of an engine's keys and values on a GPU; an engine that is told so doesn't mind what others free meanwhile."""
FREE_SHARE = 0.1
"""Part of a GPU's memory that must be free when an engine starts."""


def _free_memory() -> None:
    """Nothing of this process may give memory back while an engine starts."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(stages: Stages) -> dict[str, float]:
    """Every value."""
    correct = Correct(stages)
    found: dict[str, float] = {}
    gaps: dict[str, float] = {}
    if stages.wants("alone"):
        found |= stages.once("alone", correct.alone, needs_s=60)
    if stages.wants("sampled"):
        for name in ENGINES:
            stages.once(name, partial(correct.sampled, name), needs_s=90)
        gaps |= stages.once("scored", correct.scored, needs_s=40)
    if stages.wants("updated"):
        gaps |= stages.once("updated", correct.updated, needs_s=120)
    if stages.wants("routes"):
        found |= stages.once("routes", correct.routes, needs_s=120)
    return found | compared(gaps)


def compared(gaps: Mapping[str, float]) -> dict[str, float]:
    """What is told of gaps: those at their best, and what each switch adds to them where both were measured."""
    found = {name: gaps[name] for name in ("parity_mean", "parity_max", "cached_share") if name in gaps}
    if "parity_mean" in gaps:
        measured = [name for name in SWITCHED if f"{name}_mean" in gaps]
        found |= {f"{name}_adds": gaps[f"{name}_mean"] - gaps["parity_mean"] for name in measured}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    words = DESCRIPTION.replace("TEMPERATURE", str(TEMPERATURE))
    return run_part(Part("correct", words, measure, ("vllm", "torch", "megatron-core"), CHOICES), argv)


if __name__ == "__main__":
    raise SystemExit(main())
