"""Items through the durable queue from four processes, against straw's own RPC and against three synced appends."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import psutil
import straw
from straw.backend import FilesystemBackend
from straw.protocol import Lease
from straw.rpc import QueueClient, serve

from benchmarks.report import benchmark_parser, build_report, parse_options, print_report
from pipeline.coordinator import Coordinator, open_coordinator
from pipeline.coordinator_config import CoordinatorConfig
from pipeline.messages import AcceptReply, AcceptRequest, LeaseReply, decode, encode
from storage.columns import EncodedGroup, encode_group
from storage.pool import Pool
from storage.positions import PositionRanges
from storage.summary import GroupSummary, summarize
from storage.writer import WriteLimits
from vime.data.prompts import PromptSource
from vime.utils.types import Sample

NUM_PRODUCERS = 4
BATCH = WriteLimits().batch_groups
"""Most groups that a producer leases, publishes and has accepted together: what a run's producers publish together."""
MODES = ("gc_off", "gc_on")
PACK_BYTES = 16 * 2**20
DESCRIPTION = f"""\
Measures {NUM_PRODUCERS} producer processes on one queue, on the file system of --folder. An item is a prompt that is
submitted, leased, generated (its group of 100 kB is at hand) and accepted. Each repeat measures items per second of

  raw          three appends for each item (300 bytes, the group, 300 bytes), each with an fdatasync, in a file of each
               producer's own: durable, with no queue at all
  straw_rpc    straw's own server and client, one item at a time: submit_tasks, acquire, publish, complete_task
  vime         the coordinator behind a socket: prompts submitted as they run out, up to {BATCH} groups leased,
               published and accepted together; then a commit, which records them as trained and rotates the queue

the last two with storage kept (gc_off) and reclaimed (gc_on: straw's catalog there, the collection of each commit
here). All take turns at being first. ops_over_raw_M and ops_over_straw_rpc_M are the ratios of one mode,
ops_over_raw and ops_over_straw_rpc the smaller of both modes. cpu_ms_per_item_* is the processor time of all
processes of a side for one item: no side can do more items a second than cores / that.
"""
Work = Callable[[int], None]


def producer(number: int, folder: Path, conn: Connection) -> None:
    """One producer process: for each (side, items) that it is sent, prepares, waits for the word, works, tells when."""
    sides: dict[str, Work] = {}
    while (order := conn.recv()) is not None:
        side, items = order
        if side not in sides:
            sides[side] = _prepared(side, number, folder)
        conn.send("ready")
        conn.recv()
        started, cpu_s = time.monotonic(), time.process_time()
        sides[side](items)
        conn.send((started, time.monotonic(), time.process_time() - cpu_s))


def _prepared(side: str, number: int, folder: Path) -> Work:
    if side == "raw":
        return raw_producer(folder / f"raw_{number}")
    kind, _, mode = side.partition(".")
    make = straw_producer if kind == "straw_rpc" else vime_producer
    return make(number, folder / side, mode)


def raw_producer(path: Path) -> Work:
    """Three synced appends for each item."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    group, _ = example_group()
    parts = [b"s" * 300, b"".join([group.header, *(array.tobytes() for array in group.columns.values())]), b"a" * 300]

    def work(items: int) -> None:
        for _ in range(items):
            for part in parts:
                if os.write(descriptor, part) != len(part):
                    raise OSError(28, "an append was cut short")
                os.fdatasync(descriptor)

    return work


def straw_store(root: Path, mode: str) -> straw.SharedFilesystemStore:
    root.mkdir(exist_ok=True)
    return straw.SharedFilesystemStore(root, "bench", backend=FilesystemBackend(root), online_gc=mode == "gc_on")


def straw_server(root: Path, mode: str, conn: Connection) -> None:
    """straw's own server; sends its port."""
    coordinator = straw.Coordinator(straw_store(root, mode), exclusive_owner="bench")
    serve(coordinator, ("127.0.0.1", 0), token="bench", ready=lambda address: conn.send(address[1]))


def straw_producer(number: int, root: Path, mode: str) -> Work:
    """One item at a time through straw's client."""
    store = straw_store(root, mode)
    client = QueueClient(f"http://127.0.0.1:{(root / 'port').read_text()}", token="bench")
    group, _ = example_group()
    payload = b"".join([group.header, *(array.tobytes() for array in group.columns.values())])
    counter = iter(range(10**9))

    def work(items: int) -> None:
        for _ in range(items):
            task = f"{number}:{next(counter)}"
            client.call("submit_tasks", request_id=task, tasks=[straw.TaskSpec(task)])
            answer = client.call("acquire", worker_id=f"w{number}", task_prefix=f"{number}:")
            lease = Lease(**answer["assignments"][0]["lease"])
            owner = {"task_id": lease.task_id, "attempt_id": lease.attempt_id}
            ref = store.publish([straw.Record("group", payload, metadata=owner)], submission_id=task)
            client.call("complete_task", lease=lease, submission_id=task, result_ref=ref, result_digest=ref.digest)

    return work


def vime_server(root: Path, mode: str, conn: Connection) -> None:
    """The coordinator behind a socket `root/socket`; sends a word when it listens."""
    asyncio.run(_serve(root, mode, conn))


async def _serve(root: Path, mode: str, conn: Connection) -> None:
    root.mkdir()
    prompts = root / "prompts.jsonl"
    prompts.write_text('{"input": "What is 2 + 2?"}\n')
    coordinator = open_coordinator(
        open_pool=lambda: Pool.create(root / "pool", "bench", segment_bytes=PACK_BYTES),
        source=PromptSource(prompts, n_samples_per_prompt=8),
        owner="bench",
        config=CoordinatorConfig("main", [], 10**9, 10**9, lease_seconds=600, online_gc=mode == "gc_on"),
    )
    step = iter(range(10**9))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof():
            try:
                kind, size = struct.unpack("<BI", await reader.readexactly(5))
            except asyncio.IncompleteReadError:
                break
            body = await reader.readexactly(size)
            if kind == 0:
                worker, count = decode(body, tuple[str, int])
                reply = encode(coordinator.lease(worker, count))
            elif kind == 1:
                reply = encode(await coordinator.accept(decode(body, list[AcceptRequest])))
            else:
                await _commit(coordinator, next(step))
                reply = b""
            writer.write(struct.pack("<I", len(reply)) + reply)
            await writer.drain()
        writer.close()

    await asyncio.start_unix_server(answer, root / "socket")
    conn.send("listening")
    await asyncio.Event().wait()


async def _commit(coordinator: Coordinator, step: int) -> None:
    """All that waits is trained; what the commit before called trained is needed no longer."""
    waiting = await coordinator.wait_for_groups(1, 1.0) or []
    released = PositionRanges(coordinator.queue_state().trained)
    coordinator.training_completed(step, step, [group.position for group in waiting])
    coordinator.rotate(coordinator.queue_state(), released)


class VimeClient:
    """Blocking calls to `vime_server`."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._file = self._socket.makefile("rb")

    def lease(self, worker: str, count: int) -> LeaseReply:
        return decode(self._call(0, encode((worker, count))), LeaseReply)

    def accept(self, requests: list[AcceptRequest]) -> list[AcceptReply]:
        return decode(self._call(1, encode(requests)), list[AcceptReply])

    def commit(self) -> None:
        self._call(2, b"")

    def _call(self, kind: int, body: bytes) -> bytes:
        self._socket.sendall(struct.pack("<BI", kind, len(body)) + body)
        (size,) = struct.unpack("<I", self._file.read(4))
        return self._file.read(size)


def vime_producer(number: int, root: Path, _mode: str) -> Work:
    """Groups in batches through a pool of its own and the coordinator's socket."""
    pool = Pool.open(root / "pool", segment_bytes=PACK_BYTES)
    client = VimeClient(root / "socket")
    group, summary = example_group()
    counter = iter(range(10**9))

    def work(items: int) -> None:
        while items:
            leased = client.lease(f"w{number}", min(items, BATCH)).work
            refs = pool.publish_groups([(group, item.lease) for item in leased], submission_id=f"{next(counter)}")
            replies = client.accept(
                [
                    AcceptRequest(item.lease, ref, msgspec.structs.replace(summary, group_index=item.group_index))
                    for item, ref in zip(leased, refs, strict=True)
                ]
            )
            if any(reply.position is None for reply in replies):
                raise RuntimeError("a result was refused")
            items -= len(leased)

    return work


def example_group() -> tuple[EncodedGroup, GroupSummary]:
    """A group of 8 samples and about 100 kB."""
    num_tokens = 1380
    samples = [
        Sample(
            group_index=0,
            index=member,
            prompt="What is 2 + 2?",
            tokens=list(range(num_tokens)),
            response="four",
            response_length=num_tokens - 8,
            reward=1.0,
            rollout_log_probs=[-0.5] * (num_tokens - 8),
            version_spans=[(1, 0, num_tokens - 8)],
            status=Sample.Status.COMPLETED,
        )
        for member in range(8)
    ]
    return encode_group(samples), summarize(samples)


@dataclass(frozen=True)
class Measured:
    """One side in one repeat."""

    items_per_s: float
    cpu_ms_per_item: float
    """Processor time of producers and server."""


@dataclass
class Bench:
    """The processes of a run."""

    folder: Path
    producers: list[Connection]
    servers: dict[str, psutil.Process]
    """Side -> its server, where it has one."""

    def measure(self, side: str, items: int) -> Measured:
        """All producers together, `items` each; a commit included where the side has one."""
        server_cpu_s = self._server_cpu_s(side)
        for conn in self.producers:
            conn.send((side, items))
        for conn in self.producers:
            conn.recv()
        for conn in self.producers:
            conn.send("go")
        times: list[tuple[float, float, float]] = [conn.recv() for conn in self.producers]
        seconds = max(end for _, end, _ in times) - min(start for start, _, _ in times)
        if side.startswith("vime"):
            client = VimeClient(self.folder / side / "socket")
            started = time.monotonic()
            client.commit()
            seconds += time.monotonic() - started
        cpu_s = sum(cpu for _, _, cpu in times) + self._server_cpu_s(side) - server_cpu_s
        num_items = len(self.producers) * items
        return Measured(num_items / seconds, 1000 * cpu_s / num_items)

    def _server_cpu_s(self, side: str) -> float:
        if side not in self.servers:
            return 0.0
        spent = self.servers[side].cpu_times()
        return float(spent.user + spent.system)


@contextmanager
def processes(folder: Path) -> Iterator[Bench]:
    """Servers and producers, ended at the end."""
    context = multiprocessing.get_context("spawn")
    started = []
    servers = {}

    def start(target: Callable[..., None], *args: object) -> Connection:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(*args, theirs), daemon=True)
        process.start()
        started.append(process)
        return ours

    def start_server(target: Callable[..., None], side: str, mode: str) -> object:
        """What it sends when it listens."""
        word = start(target, folder / side, mode).recv()
        servers[side] = psutil.Process(started[-1].pid)
        return word

    try:
        for mode in MODES:
            port = start_server(straw_server, f"straw_rpc.{mode}", mode)
            (folder / f"straw_rpc.{mode}" / "port").write_text(str(port))
            start_server(vime_server, f"vime.{mode}", mode)
        yield Bench(folder, [start(partial(producer, number, folder)) for number in range(NUM_PRODUCERS)], servers)
    finally:
        for process in started:
            process.kill()
            process.join()


def run_repeat(bench: Bench, repeat: int, items: int, straw_items: int) -> dict[str, float]:
    """Rates and ratios of one repeat."""
    sides = ["raw", *(f"{kind}.{mode}" for kind in ("straw_rpc", "vime") for mode in MODES)]
    turn = repeat % len(sides)
    measured = {
        side: bench.measure(side, straw_items if side.startswith("straw") else items)
        for side in sides[turn:] + sides[:turn]
    }
    rates = {side: found.items_per_s for side, found in measured.items()}
    values = {f"items_per_s_{side.replace('.', '_')}": rates[side] for side in sides}
    values |= {f"cpu_ms_per_item_{side.replace('.', '_')}": measured[side].cpu_ms_per_item for side in sides}
    for name, other in (("raw", lambda _: "raw"), ("straw_rpc", lambda mode: f"straw_rpc.{mode}")):
        ratios = {mode: rates[f"vime.{mode}"] / rates[other(mode)] for mode in MODES}
        values |= {f"ops_over_{name}_{mode}": ratio for mode, ratio in ratios.items()}
        values[f"ops_over_{name}"] = min(ratios.values())
    return values


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = benchmark_parser("queue_ops", DESCRIPTION, repeats=7)
    parser.add_argument(
        "--folder", type=Path, default=Path(), help="folder on the file system to measure (default: the present one)"
    )
    options = parse_options(parser, argv)
    items, straw_items = (16, 4) if options.quick else (256, 32)
    values: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder, prefix=".bench-") as name:
        folder = Path(name).resolve()
        with processes(folder) as bench:
            run_repeat(bench, 0, BATCH, 2)  # opens what is opened once
            for repeat in range(options.repeats):
                for value, number in run_repeat(bench, repeat, items, straw_items).items():
                    values.setdefault(value, []).append(number)
        report = build_report("queue_ops", values, argv=argv, packages=["straw-queue", "msgspec"], folder=folder)
    print_report(report, only_json=options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
