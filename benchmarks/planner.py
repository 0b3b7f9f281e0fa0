"""How long planning a rollout batch takes, and how large its stored plan is."""

from __future__ import annotations

import hashlib
import random
import time
import uuid
from collections.abc import Sequence

from benchmarks.report import benchmark_parser, build_report, parse_options, print_report
from pipeline.messages import encode
from pipeline.packing import PackingSettings
from pipeline.planner import PlanSettings, plan_batch
from storage.queue_types import AcceptedGroup
from storage.refs import PoolRef
from storage.summary import GroupSummary

DESCRIPTION = """\
Measures the planner on synthetic groups: response lengths are spread evenly from 64 to 8192 tokens, microbatches hold
up to 16384 tokens, and there are 8 data-parallel ranks.

  plan_ms_GxS                 time of plan_batch for G groups of S samples
  encode_ms_GxS               time to turn that plan into the bytes that are made durable
  plan_bytes_per_sample_GxS   size of those bytes, divided by the samples

G x S is 32 x 8 and 512 x 16; with --quick the second is 64 x 16.
"""
SHAPES = ((32, 8), (512, 16))
"""(groups, samples in each)"""
QUICK_SHAPES = ((32, 8), (64, 16))
NUM_RANKS = 8
MAX_TOKENS = 16384
LENGTHS = (64, 8192)


def synthetic_groups(num_groups: int, num_samples: int) -> list[AcceptedGroup]:
    """Accepted groups whose references are as long as real ones; the same ones at every call."""
    chance = random.Random(0)
    return [_group(chance, position, num_samples) for position in range(num_groups)]


def _group(chance: random.Random, position: int, num_samples: int) -> AcceptedGroup:
    lengths = [chance.randint(*LENGTHS) for _ in range(num_samples)]
    indices = [position * num_samples + member for member in range(num_samples)]
    writer, segment = (uuid.UUID(int=chance.getrandbits(128), version=4).hex for _ in range(2))
    digest = hashlib.sha256(segment.encode()).hexdigest()
    ref = PoolRef(
        run_id="rollout",
        path=f"raw/{writer[:2]}/{writer}/{segment}.pack",
        segment_id=segment,
        segment_size=sum(lengths) * 9,
        segment_checksum=digest,
        segment_version=1,
        checksum_algorithm="sha256",
        offset=chance.getrandbits(28),
        ordinal=4,
        digest=digest,
        num_records=4,
        num_bytes=sum(lengths) * 9,
    )
    summary = GroupSummary(
        group_index=position,
        sample_indices=indices,
        rollout_ids=indices,
        total_lengths=[length + 256 for length in lengths],
        response_lengths=lengths,
        mask_sums=lengths,
        rewards=[float(chance.random() < 0.5) for _ in indices],
        min_versions=[chance.randint(1, 4)] * num_samples,
        max_versions=[5] * num_samples,
        statuses=["completed"] * num_samples,
        num_spanning_samples=0,
    )
    return AcceptedGroup(position, summary.group_index, ref, summary)


def measure(num_groups: int, num_samples: int) -> tuple[float, float, float]:
    """Milliseconds to plan, milliseconds to encode, bytes per sample; of one run on one shape."""
    groups = synthetic_groups(num_groups, num_samples)
    settings = PlanSettings(
        rollout_batch_size=num_groups,
        rollouts_per_step=num_groups * num_samples,
        packing=PackingSettings(num_ranks=NUM_RANKS, max_tokens=MAX_TOKENS),
        normalize_rewards=True,
        normalize_std=True,
    )
    started = time.perf_counter()
    plan = plan_batch(groups, settings, branch="0123456789ab", rollout_id=1, policy_version=5)
    planned = time.perf_counter()
    content = encode(plan)
    encoded = time.perf_counter()
    return (planned - started) * 1e3, (encoded - planned) * 1e3, len(content) / (num_groups * num_samples)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = benchmark_parser("planner", DESCRIPTION, repeats=5)
    options = parse_options(parser, argv)
    values: dict[str, list[float]] = {}
    for _ in range(options.repeats):
        for num_groups, num_samples in QUICK_SHAPES if options.quick else SHAPES:
            names = ("plan_ms", "encode_ms", "plan_bytes_per_sample")
            for name, number in zip(names, measure(num_groups, num_samples), strict=True):
                values.setdefault(f"{name}_{num_groups}x{num_samples}", []).append(number)
    report = build_report("planner", values, argv=argv, packages=["numpy", "msgspec"])
    print_report(report, only_json=options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
