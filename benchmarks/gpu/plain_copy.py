"""The yardstick of a publication: the same bytes by one plain broadcast, or one plain copy inside a GPU."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

REPEATS = 5
TIMEOUT_S = 120.0


def plain_seconds(num_bytes: int, gpus: int, folder: Path, receivers: int = 1) -> float:
    """Median seconds to bring bytes to where engines would be: NCCL to as many other GPUs, gloo to other processes.

    On one GPU it is a copy inside its memory. Raises `RuntimeError` when a process fails.
    """
    context = multiprocessing.get_context("spawn")
    if gpus == 1:
        return _copy_seconds(num_bytes)
    ours, theirs = context.Pipe()
    meeting = folder / f"broadcast_{time.monotonic_ns()}"
    world = 1 + receivers
    ranks = [
        context.Process(target=_broadcast, args=(rank, world, num_bytes, gpus, meeting, theirs))
        for rank in range(world)
    ]
    try:
        for rank in ranks:
            rank.start()
        if not ours.poll(TIMEOUT_S):
            raise RuntimeError(f"no broadcast of {num_bytes} bytes within {TIMEOUT_S:g} s")
        return float(ours.recv())
    finally:
        for rank in ranks:
            rank.join(10.0)
            rank.kill()


def _broadcast(rank: int, world: int, num_bytes: int, gpus: int, meeting: Path, answers: Connection) -> None:
    device = torch.device("cuda", rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus else "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    content = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(REPEATS + 1):  # the first one connects
        dist.barrier()
        started = time.perf_counter()
        dist.broadcast(content, 0)
        dist.barrier()  # gloo's sender is done before its receiver
        if gpus:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        answers.send(statistics.median(seconds[1:]))
    dist.destroy_process_group()


def _copy_seconds(num_bytes: int) -> float:
    source = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])
