"""How fast large and small groups become durable, against straw, int32 with float32, and a plain synced append."""

from __future__ import annotations

import asyncio
import io
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import straw
from straw.tensor import publish_tensors

from benchmarks.report import benchmark_parser, build_report, parse_options, print_report
from benchmarks.wide_groups import GroupShape, lease_bytes, wide_group
from storage.chunks import column_bytes
from storage.columns import Array, EncodedGroup
from storage.pool import Pool
from storage.refs import GroupRef
from storage.writer import GroupWriter

DESCRIPTION = """\
Measures what one process makes durable on the file system of --folder. A large group has 8 samples of 8192 tokens with
48 layers x top-8 routes and heads of 128 candidates (with --quick much smaller); each repeat writes it

  ours          as a group of the pool: columns uint8 / int32 / float16 with chunk digests
  straw_record  as one straw record of the same bytes
  reference     as int32 routes and float32 heads of each sample, one straw tensor publication for each field
  raw           as one append of the same bytes and one fdatasync

  bytes_per_sample_mib         bytes on disk for one sample, ours
  *_mib_per_s                  bytes of that form / seconds
  write_over_straw_record      ours / straw_record, durable bytes a second
  write_over_raw               ours / raw, durable bytes a second
  sample_rate_over_reference   ours / reference, samples a second

Then small groups of about 100 kB: SMALL of them through the writer that brings groups together, and SMALL one by one:

  small_groups_per_s_batched, small_groups_per_s_one_by_one, small_write_over_one_by_one (their ratio)

The forms take turns at being first. Ratios are of the same repeat.
"""
LARGE = GroupShape()
QUICK_LARGE = GroupShape(num_tokens=256, num_layers=4, head=16)
SMALL_GROUP = GroupShape(num_tokens=1390, num_layers=0, head=0)
SMALL = 256
"""Several transactions of the most groups that one takes, so that what starting and ending costs is spread."""
FORMS = ("ours", "straw_record", "reference", "raw")


@dataclass
class Bench:
    """The groups that are written over and over, and the numbers so far."""

    shape: GroupShape
    group: EncodedGroup
    small: EncodedGroup
    values: dict[str, list[float]] = field(default_factory=dict)

    def run_repeat(self, repeat: int, folder: Path) -> None:
        """Write the large group in each form, then the small ones both ways, into a fresh pool."""
        with Pool.create(folder / "pool", "bench") as pool:
            # The first publication of a writer makes its folders; the batched groups go through two.
            asyncio.run(_write_batched(pool, self.small))
            pool.store.publish([straw.Record("x", b"")], submission_id="warm-up")
            self._write_large(repeat, folder, pool)
            self._write_small(repeat, pool)

    def _write_large(self, repeat: int, folder: Path, pool: Pool) -> None:
        content = b"".join([self.group.header, *(column_bytes(array) for array in self.group.columns.values())])
        fields = reference_fields(self.shape, self.group)
        refs: list[GroupRef] = []

        def publish() -> None:
            refs.extend(pool.publish_groups([(self.group, lease_bytes())], submission_id="ours"))

        def publish_fields() -> None:
            for name, array in fields.items():
                publish_tensors(pool.store, {name: array}, submission_id=name)

        with (folder / "raw").open("wb", buffering=0) as raw:
            forms: dict[str, Callable[[], None]] = {
                "ours": publish,
                "straw_record": lambda: pool.store.publish([straw.Record("x", content)], submission_id="straw"),
                "reference": publish_fields,
                "raw": lambda: _append(raw, content),
            }
            turns = [FORMS[(turn + repeat) % len(FORMS)] for turn in range(len(FORMS))]
            seconds = {form: _seconds(forms[form]) for form in turns}
        sizes = dict.fromkeys(FORMS, len(content)) | {"reference": sum(array.nbytes for array in fields.values())}
        for form in FORMS:
            self._note(f"{form}_mib_per_s", sizes[form] / seconds[form] / 2**20)
        self._note("bytes_per_sample_mib", refs[0].segment_size / self.shape.num_samples / 2**20)
        self._note("write_over_straw_record", seconds["straw_record"] / seconds["ours"])
        self._note("write_over_raw", seconds["raw"] / seconds["ours"])
        self._note("sample_rate_over_reference", seconds["reference"] / seconds["ours"])

    def _write_small(self, repeat: int, pool: Pool) -> None:
        def one_by_one() -> None:
            for number in range(SMALL):
                pool.publish_groups([(self.small, lease_bytes(number))], submission_id=f"small {number}")

        sides = {"batched": lambda: asyncio.run(_write_batched(pool, self.small)), "one_by_one": one_by_one}
        turns = list(sides) if repeat % 2 == 0 else list(reversed(sides))
        seconds = {side: _seconds(sides[side]) for side in turns}
        for side in sides:
            self._note(f"small_groups_per_s_{side}", SMALL / seconds[side])
        self._note("small_write_over_one_by_one", seconds["one_by_one"] / seconds["batched"])

    def _note(self, name: str, number: float) -> None:
        self.values.setdefault(name, []).append(number)


def reference_fields(shape: GroupShape, group: EncodedGroup) -> dict[str, Array]:
    """Routes as int32 and heads as int32 and float32, each sample by itself."""
    fields: dict[str, Array] = {}
    for member in range(shape.num_samples):
        responses = slice(member * shape.num_responses, (member + 1) * shape.num_responses)
        rows = slice(member * (shape.num_tokens - 1), (member + 1) * (shape.num_tokens - 1))
        routes = group.columns["routes"][:, rows].transpose(1, 0, 2)
        fields[f"{member}.routes"] = np.ascontiguousarray(routes, np.int32)
        fields[f"{member}.ids"] = group.columns["top_k_ids"][responses]
        fields[f"{member}.log_probs"] = group.columns["top_k_log_probs"][responses].astype(np.float32)
    return fields


async def _write_batched(pool: Pool, group: EncodedGroup) -> None:
    """As a producer does it whose groups finish at about the same time."""
    writer: GroupWriter[int] = GroupWriter(pool, "bench")
    for number in range(SMALL):
        await writer.put(group, lease_bytes(number), number)
    written = 0
    async with aclosing(writer.batches()) as batches:
        async for batch in batches:
            written += len(batch)
            if written == SMALL:
                return


def _append(raw: io.FileIO, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[raw.write(view) :]
    os.fdatasync(raw.fileno())


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = benchmark_parser("storage_write", DESCRIPTION, repeats=7)
    parser.add_argument(
        "--folder", type=Path, default=Path(), help="folder on the file system to measure (default: the present one)"
    )
    options = parse_options(parser, argv)
    shape = QUICK_LARGE if options.quick else LARGE
    bench = Bench(shape, wide_group(shape), wide_group(SMALL_GROUP))
    for repeat in range(options.repeats):
        with tempfile.TemporaryDirectory(dir=options.folder, prefix=".bench-") as name:
            bench.run_repeat(repeat, Path(name).resolve())
    report = build_report(
        "storage_write",
        bench.values,
        argv=argv,
        packages=["straw-queue", "numpy", "msgspec", "xxhash"],
        folder=options.folder,
    )
    print_report(report, only_json=options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
