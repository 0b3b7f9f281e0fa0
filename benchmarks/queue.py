"""What the durable queue can do: groups leased, and groups published and accepted, against a plain synced append."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import benchmark_parser, build_report, parse_options, print_report
from storage.columns import EncodedGroup, encode_group, summary_from_header
from storage.pool import Pool
from storage.queue import GroupQueue
from storage.queue_types import LeasedGroup
from vime.data.cursor import PromptCursor, PromptTask
from vime.utils.types import Sample

DESCRIPTION = """\
Measures the queue in one process, without Ray, on the file system of --folder. A group has 8 samples of 1024 tokens
(128 with --quick); in batches of B = 1, 8 and 32 groups, each repeat measures

  lease_groups_per_s_B            leasing: one journal transaction a batch
  publish_groups_per_s_B          making payloads durable: one transaction a batch
  accept_groups_per_s_B           accepting what was published: one transaction a group
  publish_accept_groups_per_s_B   the last two together, as a producer does them
  publish_bytes_per_s_B           payload bytes of the publishing
  raw_bytes_per_s_B               the same bytes appended to one file, with one fdatasync a batch: the limit
  publish_of_raw_B                publish_bytes_per_s_B / raw_bytes_per_s_B of the same repeat

Publishing and raw appending take turns at being first. Numbers depend on the disk and on who else uses it: compare the
ratios.
"""
BATCHES = (1, 8, 32)
NUM_SAMPLES = 8
NUM_TOKENS = 1024
QUICK_TOKENS = 128
GROUPS_PER_REPEAT = 32
"""Groups that each batch size handles in one repeat."""


@dataclass
class Bench:
    """An open pool and queue, the group that is published over and over, and the numbers so far."""

    pool: Pool
    queue: GroupQueue
    group_tokens: int
    raw: int
    """Descriptor of the file for the raw appends."""
    values: dict[str, list[float]] = field(default_factory=dict)

    def run_repeat(self, repeat: int, batch: int, num_groups: int) -> None:
        """One repeat of one batch size."""
        leased = self._lease(batch, num_groups)
        encoded = [encode_group(_samples(item.group_index, self.group_tokens)) for item in leased]
        batches = [slice(start, start + batch) for start in range(0, num_groups, batch)]
        names = [f"bench:{repeat}:{batch}:{part.start}" for part in batches]
        refs = []

        def publish() -> None:
            for part, name in zip(batches, names, strict=True):
                items = [(group, item.lease) for group, item in zip(encoded[part], leased[part], strict=True)]
                refs.extend(self.pool.publish_groups(items, submission_id=name))

        contents = [b"".join(map(_content, encoded[part])) for part in batches]

        def append() -> None:
            for content in contents:
                if os.write(self.raw, content) != len(content):
                    raise OSError(28, "the raw append was cut short")
                os.fdatasync(self.raw)

        sides = [publish, append] if repeat % 2 == 0 else [append, publish]
        seconds = {side: _seconds(side) for side in sides}

        def accept() -> None:
            for item, ref, group in zip(leased, refs, encoded, strict=True):
                self.queue.accept(item.lease, ref, summary_from_header(group.header))

        accept_s = _seconds(accept)
        num_bytes = sum(map(len, contents))
        self._note("publish_groups_per_s", batch, num_groups / seconds[publish])
        self._note("accept_groups_per_s", batch, num_groups / accept_s)
        self._note("publish_accept_groups_per_s", batch, num_groups / (seconds[publish] + accept_s))
        self._note("publish_bytes_per_s", batch, num_bytes / seconds[publish])
        self._note("raw_bytes_per_s", batch, num_bytes / seconds[append])
        self._note("publish_of_raw", batch, seconds[append] / seconds[publish])

    def _lease(self, batch: int, num_groups: int) -> list[LeasedGroup]:
        _submit(self.queue, num_groups)
        leased: list[LeasedGroup] = []

        def lease() -> None:
            while len(leased) < num_groups:
                leased.extend(self.queue.lease("bench", batch))

        self._note("lease_groups_per_s", batch, num_groups / _seconds(lease))
        return leased

    def _note(self, name: str, batch: int, number: float) -> None:
        self.values.setdefault(f"{name}_{batch}", []).append(number)


def _submit(queue: GroupQueue, num_groups: int) -> None:
    """Fresh prompts, not measured."""
    first = queue.cursor().next_group_index
    prompts = [
        PromptTask(
            group_index=index, first_sample_index=index * NUM_SAMPLES, epoch=0, row=index, prompt="What is 2 + 2?"
        )
        for index in range(first, first + num_groups)
    ]
    stop = first + num_groups
    queue.submit_prompts(prompts, PromptCursor(0, stop, stop, stop * NUM_SAMPLES))


def _samples(group_index: int, num_tokens: int) -> list[Sample]:
    return [
        Sample(
            group_index=group_index,
            index=group_index * NUM_SAMPLES + member,
            prompt="What is 2 + 2?",
            tokens=list(range(num_tokens)),
            response="four",
            response_length=num_tokens - 8,
            reward=1.0,
            rollout_log_probs=[-0.5] * (num_tokens - 8),
            version_spans=[(1, 0, num_tokens - 8)],
            status=Sample.Status.COMPLETED,
        )
        for member in range(NUM_SAMPLES)
    ]


def _content(group: EncodedGroup) -> bytes:
    """All bytes of a group's payload."""
    return b"".join([group.header, *(array.tobytes() for array in group.columns.values())])


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = benchmark_parser("queue", DESCRIPTION, repeats=7)
    parser.add_argument(
        "--folder", type=Path, default=Path(), help="folder on the file system to measure (default: the present one)"
    )
    options = parse_options(parser, argv)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix=".bench-") as name:
        folder = Path(name).resolve()
        raw = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            with (
                Pool.create(folder / "pool", "bench") as pool,
                GroupQueue.open(pool, owner="bench", lease_seconds=600) as queue,
            ):
                bench = Bench(pool, queue, QUICK_TOKENS if options.quick else NUM_TOKENS, raw)
                for repeat in range(options.repeats):
                    for batch in BATCHES:
                        bench.run_repeat(repeat, batch, max(batch, 4) if options.quick else GROUPS_PER_REPEAT)
        finally:
            os.close(raw)
        report = build_report(
            "queue", bench.values, argv=argv, packages=["straw-queue", "numpy", "msgspec"], folder=folder
        )
    print_report(report, only_json=options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
