"""What a batch's plan tells of its samples beyond the fixed columns, under the names that other systems know it by."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from pipeline.planner import BatchPlan, PlannedSample
from storage.sample_sums import SampleSums, total

MEANINGS: Mapping[str, str] = {
    "rollout/repetition_frac": "Share of the batch's samples whose response repeats itself: of at least 1,000 "
    "characters, the last 10,000 of which zlib makes ten times smaller.",
    "rollout/avg_cached_tokens_per_sample": "Prompt tokens that engines had in their prefix cache, a sample.",
    "rollout/staleness/unknown_count": "Samples with a response and without a policy version; they count in neither "
    "mean nor maximum of the staleness.",
    "rollout/top_p_kept_vocab_per_token": "Tokens that top-p left to sample from, a sampled token; where they are "
    "recorded.",
    "rollout/spec_accept_rate": "Speculative decoding: accepted drafted tokens, of all drafted; where there are any.",
    "rollout/spec_accept_length": "Speculative decoding: sampled tokens, divided by the steps that verified drafts; "
    "over the samples that had any. `Sample.spec_info.accept_length` is the same of one sample.",
    "perf/tokens_per_gpu_per_sec": "Response tokens of the batch, divided by `step_s` and the GPUs of the engines; "
    "where vime starts the engines.",
    "perf/effective_tokens_per_gpu_per_sec": "The same of the tokens that count in the loss.",
    "perf/longest_sample_tokens_per_sec": "Tokens of the batch's longest response, divided by `step_s`.",
    "perf/longest_effective_sample_tokens_per_sec": "The same of the tokens that count in the loss, of the sample with "
    "most of them.",
    "perf/non_generation_time/mean": "Seconds that the batch's samples spent outside the engine, as in the reward; "
    "where any did.",
    "perf/non_generation_time/median": "Their median.",
    "perf/non_generation_time/max": "Their maximum.",
    "perf/non_generation_time/min": "Their minimum.",
    "perf/longest_sample_non_generation_time": "The mean of these seconds over the samples with the longest response.",
}
"""Name -> what it means."""


def sample_metrics(plan: BatchPlan, *, step_s: float, num_engine_gpus: int) -> dict[str, float]:
    """Name of `MEANINGS` -> value, of those that the samples have; `num_engine_gpus` 0 where it isn't known."""
    samples = plan.samples
    return {
        **_of_sums(total(group.sums for group in plan.groups), len(samples)),
        "rollout/staleness/unknown_count": sum(sample.is_of_unknown_version for sample in samples),
        **_rates([s.response_length for s in samples], max(step_s, 1e-9), num_engine_gpus, ""),
        **_rates([s.num_loss_tokens for s in samples], max(step_s, 1e-9), num_engine_gpus, "effective_"),
        **_outside_the_engine(samples),
    }


def _of_sums(sums: SampleSums, num_samples: int) -> dict[str, float]:
    found = {
        "rollout/repetition_frac": sums.num_repetitive / num_samples,
        "rollout/avg_cached_tokens_per_sample": sums.num_cached_tokens / num_samples,
    }
    if sums.num_kept_positions:
        found["rollout/top_p_kept_vocab_per_token"] = sums.num_kept_tokens / sums.num_kept_positions
    if sums.num_drafted_tokens:
        found["rollout/spec_accept_rate"] = sums.num_accepted_tokens / sums.num_drafted_tokens
    if sums.num_verify_steps:
        found["rollout/spec_accept_length"] = sums.num_verified_tokens / sums.num_verify_steps
    return found


def _rates(lengths: Sequence[int], step_s: float, num_engine_gpus: int, which: str) -> dict[str, float]:
    found = {f"perf/longest_{which}sample_tokens_per_sec": max(lengths) / step_s}
    if num_engine_gpus:
        found[f"perf/{which}tokens_per_gpu_per_sec"] = sum(lengths) / step_s / num_engine_gpus
    return found


def _outside_the_engine(samples: Sequence[PlannedSample]) -> dict[str, float]:
    seconds = [sample.non_generation_s for sample in samples]
    if not any(seconds):
        return {}
    longest = max(sample.response_length for sample in samples)
    of_longest = [sample.non_generation_s for sample in samples if sample.response_length == longest]
    return {
        "perf/non_generation_time/mean": statistics.fmean(seconds),
        "perf/non_generation_time/median": statistics.median(seconds),
        "perf/non_generation_time/max": max(seconds),
        "perf/non_generation_time/min": min(seconds),
        "perf/longest_sample_non_generation_time": statistics.fmean(of_longest),
    }
