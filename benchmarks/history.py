"""Whether a restart costs more after a long history: the same pending groups, with few and with many behind them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from benchmarks.report import benchmark_parser, build_report, parse_options, print_report
from pipeline.coordinator import Coordinator, open_coordinator
from pipeline.coordinator_config import CoordinatorConfig
from storage.columns import encode_group
from storage.pool import Pool
from storage.positions import PositionRanges
from storage.queue import GroupQueue
from storage.queue_types import GroupResult
from storage.summary import summarize
from vime.data.cursor import PromptCursor, PromptTask
from vime.data.prompts import PromptSource
from vime.utils.types import Sample

DESCRIPTION = """\
Measures two queues whose groups went the whole way (prompt, lease, result, training, commit with rotation, in batches
of BATCH groups), the long one with 100,000 trained groups and the short one with 1,000 (with --quick 5,000 and 1,000).
Both end with the same PENDING accepted groups that are not trained. Then each repeat opens each of them as a resume
does, in a fresh process that has imported everything, the two taking turns at being first:

  restart_s_short, restart_s_long        pool, queue and coordinator opened, the identity counted
  restart_ratio                          long / short of the same repeat
  memory_mib_short, memory_mib_long      growth of the process's peak memory by that
  memory_ratio                           long / short of the same repeat

Another two of the same sizes, with storage reclaimed at each commit (all but what the newest two commits need), give
the same values with _gc at the end, and

  disk_mib_short_gc, disk_mib_long_gc    bytes of all files of the pool
  disk_ratio                             long / short

The queues are built in /dev/shm where there is one, because building syncs each transaction, and are measured on the
file system of --folder. The long ones take some minutes.
"""
BATCH = 250
PENDING = 500
PUBLISHED_TOGETHER = 50
NUM_TOKENS = 600
"""Of each of the two members: a group has about 10 kB."""
PACK_BYTES = 2 * 2**20
SIZES = {"short": 1_000, "long": 100_000}
QUICK_SIZES = {"short": 1_000, "long": 5_000}
BRANCH = "before"
_TOKENS = list(range(NUM_TOKENS))
_LOG_PROBS = [-0.5] * (NUM_TOKENS - 2)


class Measured(msgspec.Struct):
    """What a fresh process says of one restart."""

    restart_s: float
    memory_mib: float
    trained: int
    pending: int


def build(root: Path, num_trained: int, *, reclaim: bool, batch_size: int = BATCH) -> None:
    """A queue with so many trained groups and `PENDING` that wait; `trained.json` holds what its commit says.

    `batch_size` divides both.
    """
    trained = PositionRanges()
    waiting: deque[int] = deque()
    with (
        Pool.create(root, "bench", segment_bytes=PACK_BYTES) as pool,
        GroupQueue.open(pool, owner="build", lease_seconds=3600) as queue,
    ):
        queue.begin_session(BRANCH)
        for start in range(0, num_trained + PENDING, batch_size):
            waiting.extend(_accept(pool, queue, start, batch_size))
            if len(waiting) > PENDING:
                released = PositionRanges(trained.ranges())
                batch = [waiting.popleft() for _ in range(batch_size)]
                queue.record_trained(BRANCH, start, 1, batch)
                trained.update(batch)
                queue.rotate(BRANCH, trained, released if reclaim else None)
                if reclaim:
                    queue.collect_garbage()
    (root / "trained.json").write_text(json.dumps(trained.ranges()))


def _accept(pool: Pool, queue: GroupQueue, start: int, count: int) -> list[int]:
    """Positions of so many new groups."""
    prompts = [
        PromptTask(group_index=index, first_sample_index=2 * index, epoch=0, row=index, prompt="What is 2 + 2?")
        for index in range(start, start + count)
    ]
    stop = start + count
    queue.submit_prompts(prompts, PromptCursor(0, stop, stop, 2 * stop))
    positions: list[int] = []
    while leased := queue.lease("build", PUBLISHED_TOGETHER):
        groups = [_samples(item.group_index) for item in leased]
        items = [(encode_group(group), item.lease) for group, item in zip(groups, leased, strict=True)]
        refs = pool.publish_groups(items, submission_id=f"groups:{leased[0].group_index}")
        results = [
            GroupResult(item.lease, ref, summarize(group))
            for item, ref, group in zip(leased, refs, groups, strict=True)
        ]
        positions += [receipt.position for receipt in queue.accept_many(results) if receipt is not None]
    return positions


def _samples(group_index: int) -> list[Sample]:
    return [
        Sample(
            group_index=group_index,
            index=2 * group_index + member,
            tokens=_TOKENS,
            response_length=NUM_TOKENS - 2,
            reward=float(member),
            rollout_log_probs=_LOG_PROBS,
            version_spans=[(1, 0, NUM_TOKENS - 2)],
            status=Sample.Status.COMPLETED,
        )
        for member in range(2)
    ]


def open_as_coordinator(root: Path) -> Coordinator:
    """Open the queue as a session's coordinator does, with what `trained.json` holds, if it is there, as trained."""
    listed = root / "trained.json"
    trained = [(first, last) for first, last in json.loads(listed.read_text())] if listed.exists() else []
    prompts = root / "prompts.jsonl"
    if not prompts.exists():
        prompts.write_text('{"input": "What is 2 + 2?"}\n')
    source = PromptSource(prompts, n_samples_per_prompt=2)
    config = CoordinatorConfig("after", trained, groups_wanted=10**9, max_groups=1000, lease_seconds=60)
    return open_coordinator(open_pool=lambda: Pool.open(root), source=source, owner="bench", config=config)


def measure(root: Path) -> Measured:
    """Open a queue in this process as a resume does."""
    process = psutil.Process()
    before = process.memory_info().rss
    started = time.perf_counter()
    coordinator = open_as_coordinator(root)
    identity = coordinator.identity()
    restart_s = time.perf_counter() - started
    peak = _peak_bytes()
    coordinator.close()
    return Measured(restart_s, (peak - before) / 2**20, identity.trained, identity.pending)


def _peak_bytes() -> int:
    """Peak resident memory of this process since it began its program."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)


def measure_in_fresh_process(root: Path) -> Measured:
    command = [sys.executable, "-m", "benchmarks.history", "--measure", str(root)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Measured)


def build_fast(folder: Path, name: str, num_trained: int, *, reclaim: bool, batch_size: int = BATCH) -> Path:
    """`build`, in memory where that is possible, then copied into the folder; the pool's root."""
    fast = Path("/dev/shm")
    root = folder / name
    with tempfile.TemporaryDirectory(dir=fast if fast.is_dir() else folder, prefix=".bench-") as temporary:
        build(Path(temporary) / name, num_trained, reclaim=reclaim, batch_size=batch_size)
        shutil.copytree(Path(temporary) / name, root)
    return root


def _disk_mib(root: Path) -> float:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) / 2**20


def measure_all(folder: Path, sizes: dict[str, int], repeats: int, *, reclaim: bool) -> dict[str, list[float]]:
    """Values of one mode."""
    suffix = "_gc" if reclaim else ""
    values: dict[str, list[float]] = {}
    roots = {
        name: build_fast(folder, f"{name}{suffix}", num_trained, reclaim=reclaim) for name, num_trained in sizes.items()
    }
    disk = {name: _disk_mib(root) for name, root in roots.items()}
    for repeat in range(repeats):
        names = list(sizes) if repeat % 2 == 0 else list(sizes)[::-1]
        found = {name: measure_in_fresh_process(roots[name]) for name in names}
        for name, measured in found.items():
            if (measured.trained, measured.pending) != (sizes[name], PENDING):
                raise RuntimeError(f"{name}: expected {sizes[name]} trained and {PENDING} pending, got {measured}")
        for value in ("restart_s", "memory_mib"):
            numbers = {name: getattr(measured, value) for name, measured in found.items()}
            for name in sizes:
                values.setdefault(f"{value}_{name}{suffix}", []).append(numbers[name])
            ratio = f"{value.split('_')[0]}_ratio{suffix}"
            values.setdefault(ratio, []).append(numbers["long"] / numbers["short"])
        if reclaim:
            for name in sizes:
                values.setdefault(f"disk_mib_{name}_gc", []).append(disk[name])
            values.setdefault("disk_ratio", []).append(disk["long"] / disk["short"])
    return values


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = benchmark_parser(
        "history", DESCRIPTION.replace("BATCH", str(BATCH)).replace("PENDING", str(PENDING)), repeats=7
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(), help="folder on the file system to measure (default: the present one)"
    )
    parser.add_argument("--measure", type=Path, help="open this queue once and print the numbers (used by itself)")
    options = parse_options(parser, argv)
    if options.measure is not None:
        print(msgspec.json.encode(measure(options.measure)).decode())
        return 0
    sizes = QUICK_SIZES if options.quick else SIZES
    values: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder, prefix=".bench-") as temporary:
        folder = Path(temporary).resolve()
        for reclaim in (False, True):
            values |= measure_all(folder, sizes, options.repeats, reclaim=reclaim)
        report = build_report("history", values, argv=argv, packages=["straw-queue", "msgspec"], folder=folder)
    print_report(report, only_json=options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
