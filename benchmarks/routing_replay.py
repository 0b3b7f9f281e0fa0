"""How much nearer an fp32 trainer comes to a bf16 sampler of a mixture of experts by replaying its routes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.expert_sampler import NUM_EXPERTS, Bf16Sampler, half_trained_model, save
from benchmarks.report import benchmark_parser, build_report, parse_options, print_report
from benchmarks.wide_groups import lease_bytes
from pipeline.packing import PackingSettings
from pipeline.planner import BatchPlan, PlanSettings, plan_batch
from pipeline.shard_needs import ShardNeeds
from pipeline.shards import RankShard
from storage.columns import encode_group
from storage.pool import Pool
from storage.queue_types import AcceptedGroup
from storage.summary import summarize
from vime.backends.megatron_utils.config import TrainerConfig
from vime.backends.megatron_utils.trainer import MegatronTrainer
from vime.utils.types import Sample

DESCRIPTION = """\
Trains a tiny Qwen3-MoE (4 layers, 8 experts, top 2) for 60 steps on writing digits backwards, where it is unsure
between experts. A bf16 sampler with cached keys and values then writes 128 groups of 8 samples with their routes to a
pool on disk; a float32 trainer of one rank reads them back and scores them, with and without replaying the routes. Each
repeat has prompts and samples of its own.

  max_gap, max_gap_replayed        largest difference of the log-probabilities of a token
  k3_gap, k3_gap_replayed          mean over tokens of r - 1 - log r, r = trainer / sampler
  mean_gap, mean_gap_replayed      mean absolute difference
  max_gap_cut, k3_gap_cut          how many times smaller replay makes them

With --quick there are 32 groups.
"""
GROUP_SIZE = 8
SFT_STEPS = 60


def publish(pool: Pool, groups: Sequence[Sequence[Sample]], number: int) -> BatchPlan:
    """Store the groups as a producer does, and plan them as one optimizer step of one rank."""
    items = [(encode_group(group, num_experts=NUM_EXPERTS), lease_bytes(index)) for index, group in enumerate(groups)]
    refs = pool.publish_groups(items, submission_id=f"repeat {number}")
    accepted = [
        AcceptedGroup(index, index, ref, summarize(group))
        for index, (ref, group) in enumerate(zip(refs, groups, strict=True))
    ]
    size = sum(map(len, groups))
    settings = PlanSettings(
        rollout_batch_size=len(groups),
        rollouts_per_step=size,
        packing=PackingSettings(num_ranks=1, max_tokens=512),
        normalize_rewards=True,
        normalize_std=True,
    )
    return plan_batch(accepted, settings, branch="benchmark", rollout_id=number, policy_version=0)


def gaps(trainer: MegatronTrainer, pool: Pool, plan: BatchPlan) -> dict[str, float]:
    """Distances of trainer and sampler on the stored samples, with and without replay."""
    found: dict[str, float] = {}
    with RankShard(pool, plan, trainer.data_parallel_rank, needs=ShardNeeds(routes=trainer.route_part)) as shard:
        step = shard.step(0)
        sampler = np.concatenate([batch.sampler_log_probs for batch in step])
        for name, replay in (("", False), ("_replayed", True)):
            scored = np.concatenate(trainer.log_probs(step, replay_routes=replay))
            difference = scored.astype(np.float64) - sampler
            found[f"max_gap{name}"] = float(np.abs(difference).max())
            found[f"mean_gap{name}"] = float(np.abs(difference).mean())
            found[f"k3_gap{name}"] = float((np.expm1(difference) - difference).mean())
    for kind in ("max", "k3"):
        found[f"{kind}_gap_cut"] = found[f"{kind}_gap"] / found[f"{kind}_gap_replayed"]
    return found


def measure(folder: Path, num_groups: int, repeats: int) -> dict[str, list[float]]:
    """Every value of every repeat; files go to `folder`."""
    torch.set_num_threads(1)  # sums in the same order on every machine
    model = half_trained_model(SFT_STEPS)
    sampler, checkpoint = Bf16Sampler(model), save(model, folder / "checkpoint")
    config = TrainerConfig(hf_checkpoint=checkpoint, replay_routes=True, num_threads=1)
    values: dict[str, list[float]] = {}
    with (
        Pool.create(folder / "pool", "benchmark") as pool,
        MegatronTrainer(config, 0, 1, f"file://{folder}/rendezvous") as trainer,
    ):
        trainer.load_hf()
        for number in range(repeats):
            plan = publish(pool, sampler.sample(num_groups, GROUP_SIZE, seed=number), number)
            for name, value in gaps(trainer, pool, plan).items():
                values.setdefault(name, []).append(value)
    return values


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    options = parse_options(benchmark_parser("routing_replay", DESCRIPTION, repeats=5), argv)
    packages = ["torch", "transformers", "megatron-core"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        values = measure(folder, 32 if options.quick else 128, options.repeats)
        report = build_report("routing_replay", values, argv=argv, packages=packages, folder=folder)
    print_report(report, only_json=options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
