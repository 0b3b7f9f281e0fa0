"""What it takes to check a group, to bring it into its stored form and back, and how many bytes that form has."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from benchmarks.report import benchmark_parser, build_report, parse_options, print_report
from storage.checks import EnqueueRequirements, check_enqueue
from storage.columns import decode_group, encode_group
from storage.route_checks import RouteShape
from vime.utils.types import Sample

DESCRIPTION = """\
Measures one group of 8 samples of 8192 tokens (prompt 256), with routes of 48 layers x top-8 of 128 experts and
128-entry heads of a vocabulary of 151936; with --quick of 512 tokens. One thread, no disk; times are of the processor,
so that other work on the machine matters less.

  check_ms                 check_enqueue of the group: every number of every column is looked at
  encode_ms_T, decode_ms_T to the stored form and back, with heads stored as T (float16 or float32)
  bytes_per_sample_mib_T   header and columns, divided by the samples
"""
NUM_SAMPLES, PROMPT = 8, 256
TOKENS, QUICK_TOKENS = 8192, 512
SHAPE = RouteShape(num_layers=48, top_k=8, num_experts=128)
TOP_K, VOCAB = 128, 151936


def synthetic_group(num_tokens: int, seed: int = 0) -> list[Sample]:
    """Samples that pass every check; text of four characters a token."""
    rng = np.random.default_rng(seed)
    return [_sample(rng, index, num_tokens) for index in range(NUM_SAMPLES)]


def _sample(rng: np.random.Generator, index: int, num_tokens: int) -> Sample:
    length = num_tokens - PROMPT
    log_probs = np.sort(rng.normal(0.0, 3.0, (length, TOP_K)).astype(np.float32), axis=1)[:, ::-1]
    log_probs = log_probs - np.log(np.exp(log_probs).sum(axis=1, keepdims=True)) - 0.05
    per_expert, per_id = SHAPE.num_experts // SHAPE.top_k, VOCAB // TOP_K
    routes = rng.integers(0, per_expert, (num_tokens - 1, SHAPE.num_layers, SHAPE.top_k))
    return Sample(
        group_index=0,
        index=index,
        tokens=rng.integers(0, VOCAB, num_tokens).tolist(),
        response="text" * length,
        response_length=length,
        reward=1.0,
        rollout_log_probs=(-rng.random(length)).tolist(),
        rollout_topk_token_ids=(rng.integers(0, per_id, (length, TOP_K)) + np.arange(TOP_K) * per_id).astype(np.int32),
        rollout_topk_log_probs=log_probs,
        rollout_routed_experts=(routes + np.arange(SHAPE.top_k) * per_expert).astype(np.uint8),
        version_spans=[(0, 0, length)],
        weight_versions=["0"],
        status=Sample.Status.COMPLETED,
    )


def measure(samples: list[Sample]) -> dict[str, float]:
    """Every value of the report, once."""
    needs = EnqueueRequirements(routes=SHAPE, sc_top_k=TOP_K, vocab_size=VOCAB)
    started = time.process_time()
    check_enqueue(samples, needs)
    values = {"check_ms": (time.process_time() - started) * 1e3}
    for dtype in ("float16", "float32"):
        started = time.process_time()
        group = encode_group(samples, sc_dtype=dtype, num_experts=SHAPE.num_experts)
        encoded = time.process_time()
        decode_group(group.header, group.columns)
        values[f"encode_ms_{dtype}"] = (encoded - started) * 1e3
        values[f"decode_ms_{dtype}"] = (time.process_time() - encoded) * 1e3
        num_bytes = len(group.header) + sum(column.nbytes for column in group.columns.values())
        values[f"bytes_per_sample_mib_{dtype}"] = num_bytes / len(samples) / 2**20
    return values


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = benchmark_parser("group_encoding", DESCRIPTION, repeats=7)
    options = parse_options(parser, argv)
    samples = synthetic_group(QUICK_TOKENS if options.quick else TOKENS)
    values: dict[str, list[float]] = {}
    for _ in range(options.repeats):
        for name, number in measure(samples).items():
            values.setdefault(name, []).append(number)
    report = build_report("group_encoding", values, argv=argv, packages=["numpy", "msgspec"])
    print_report(report, only_json=options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
