"""What one of eight ranks reads of large groups: bytes really read and peak memory, against the shard that it needs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from benchmarks.report import benchmark_parser, build_report, parse_options, print_report
from benchmarks.wide_groups import PROMPT_TOKENS, GroupShape, lease_bytes, wide_group
from storage.columns import Array
from storage.pool import Pool
from storage.refs import PoolRef

DESCRIPTION = """\
Measures what one of eight ranks reads. There are GROUPS groups of 8 samples of 8192 tokens with 48 layers x top-8
routes and heads of 128 candidates (with --quick much smaller). Each repeat starts a fresh process for the rank and lets
it read its shard, in two ways to divide the work:

  data       2 pipeline stages x 4 data-parallel ranks: half of the layers, every fourth sample
  context    2 pipeline stages x 4 context-parallel ranks: half of the layers, the 2nd and 7th eighth of each response

Values, without suffix for data and with _context for the other:

  bytes_over_shard     bytes that the process read from files / bytes of the arrays that it got
  peak_over_shard      growth of the process's peak memory / bytes of the arrays
  shard_mib, read_mib_per_s
"""
GROUPS = 4
QUICK = GroupShape(num_tokens=2048, num_layers=8, head=32)
NUM_STAGES = 2
NUM_SHARES = 4
"""Data-parallel or context-parallel ranks of a stage."""
STAGE, SHARE = 0, 1
"""The rank that is measured."""


class Order(msgspec.Struct, frozen=True):
    """What the measured process is told."""

    root: str
    refs: list[PoolRef]
    shape: list[int]
    context: bool


class Measured(msgspec.Struct, frozen=True):
    """What the measured process says."""

    shard_bytes: int
    read_bytes: int
    peak_bytes: int
    seconds: float


def read_shard(pool: Pool, ref: PoolRef, shape: GroupShape, *, context: bool) -> list[Array]:
    """All arrays that the measured rank needs of one group."""
    layers = range(STAGE * shape.num_layers // NUM_STAGES, (STAGE + 1) * shape.num_layers // NUM_STAGES)
    members = range(shape.num_samples) if context else range(SHARE, shape.num_samples, NUM_SHARES)
    arrays = []
    for member in members:
        for start, stop in _token_ranges(shape.num_responses) if context else [(0, shape.num_responses)]:
            arrays += [pool.read_rows(ref, name, member, start, stop) for name in ("loss_mask", "sampler_log_probs")]
            arrays += [pool.read_rows(ref, name, member, start, stop) for name in ("top_k_ids", "top_k_log_probs")]
            tokens = (start, stop) if context else (-PROMPT_TOKENS, stop)
            first, last = (position + PROMPT_TOKENS for position in tokens)
            arrays.append(pool.read_rows(ref, "tokens", member, first, last))
            arrays.append(pool.read_layers(ref, "routes", member, layers, first, min(last, shape.num_tokens - 1)))
    return arrays


def _token_ranges(num_tokens: int) -> list[tuple[int, int]]:
    """The two parts of a context-parallel rank: part r from the front and part r from the back, of 2 x ranks parts."""
    parts = 2 * NUM_SHARES
    edges = [part * num_tokens // parts for part in range(parts + 1)]
    return [(edges[part], edges[part + 1]) for part in (SHARE, parts - 1 - SHARE)]


def measure(order: Order) -> Measured:
    """Read the shard in this process, after a small read that loads all code."""
    shape = GroupShape(*order.shape)
    with Pool.open(order.root) as pool:
        pool.read_rows(order.refs[0], "loss_mask", 0, 0, 1)
    with Pool.open(order.root) as pool:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
        before_bytes, before_read = psutil.Process().memory_info().rss, _bytes_read()
        started = time.perf_counter()
        arrays = [array for ref in order.refs for array in read_shard(pool, ref, shape, context=order.context)]
        seconds = time.perf_counter() - started
        read_bytes = _bytes_read() - before_read
        return Measured(sum(array.nbytes for array in arrays), read_bytes, _peak_bytes() - before_bytes, seconds)


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def _peak_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _in_fresh_process(order: Order) -> Measured:
    command = [sys.executable, "-m", "benchmarks.shard_read", "--measure"]
    done = subprocess.run(command, input=msgspec.json.encode(order), stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout, type=Measured)


def _run(root: Path, shape: GroupShape, repeats: int) -> dict[str, list[float]]:
    with Pool.create(root, "bench") as pool:
        refs = [
            pool.publish_groups([(wide_group(shape, number), lease_bytes(number))], submission_id=str(number))[0]
            for number in range(GROUPS)
        ]
    values: dict[str, list[float]] = {}
    for _ in range(repeats):
        for suffix, context in (("", False), ("_context", True)):
            order = Order(str(root), refs, list(msgspec.to_builtins(shape).values()), context)
            found = _in_fresh_process(order)
            for name, number in {
                "bytes_over_shard": found.read_bytes / found.shard_bytes,
                "peak_over_shard": found.peak_bytes / found.shard_bytes,
                "shard_mib": found.shard_bytes / 2**20,
                "read_mib_per_s": found.shard_bytes / found.seconds / 2**20,
            }.items():
                values.setdefault(name + suffix, []).append(number)
    return values


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words == ["--measure"]:
        order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
        sys.stdout.buffer.write(msgspec.json.encode(measure(order)))
        return 0
    parser = benchmark_parser("shard_read", DESCRIPTION, repeats=5)
    parser.add_argument(
        "--folder", type=Path, default=Path(), help="folder on the file system to measure (default: the present one)"
    )
    options = parse_options(parser, argv)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix=".bench-") as name:
        root = Path(name).resolve() / "pool"
        values = _run(root, QUICK if options.quick else GroupShape(), options.repeats)
    packages = ["straw-queue", "numpy", "msgspec", "xxhash"]
    report = build_report("shard_read", values, argv=argv, packages=packages, folder=options.folder)
    print_report(report, only_json=options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
