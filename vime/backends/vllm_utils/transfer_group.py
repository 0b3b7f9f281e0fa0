"""A process group of our own between one trainer process (rank 0) and engine workers (ranks 1 and up).

It never touches `torch.distributed`'s default group, which belongs to the trainer or to vLLM. Over gloo its packets lie
in host memory, over NCCL on the rank's GPU; nothing else differs. The store carries short status texts, so that a
failure can be told apart by rank.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed

from vime.backends.vllm_utils.packets import Packet, PacketKind

GroupBackend = Literal["gloo", "nccl"]

_HEADER_FIELDS = 3
_dist: Any = torch.distributed  # stores and process groups have no complete type stubs

# Read by the constructor of an NCCL group. A wait then ends by an error when the timeout passes; otherwise a watchdog
# would end the whole process.
_NCCL_ENVIRONMENT = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


def local_address_towards(address: str, port: int) -> str:
    """The address of this machine's interface that reaches `address`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port or 1))
        return str(probe.getsockname()[0])


class TransferGroup:
    """Packets from rank 0 to all other ranks, with status texts. Not thread-safe; close it with `close()`."""

    def __init__(
        self,
        address: str,
        port: int,
        rank: int,
        world_size: int,
        timeout_s: float,
        *,
        backend: GroupBackend = "gloo",
        device: torch.device | None = None,
    ) -> None:
        """Open the store (rank 0 listens; port 0 lets the system choose). The group is joined by `connect()`.

        `device` is this rank's GPU for NCCL, by default the calling thread's current one.

        Raises `torch.distributed.DistError` when the store can't be reached within `timeout_s`.
        """
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device("cpu") if backend == "gloo" else device or _current_gpu()
        self._backend = backend
        self._timeout = timedelta(seconds=timeout_s)
        self._bind_address = local_address_towards(address, port)
        self._store = _dist.TCPStore(
            address, port, world_size, is_master=rank == 0, timeout=self._timeout, wait_for_workers=False
        )
        self._group: Any | None = None

    @property
    def port(self) -> int:
        return int(self._store.port)

    def connect(self) -> None:
        """Join the group: returns when every rank has joined, raises `RuntimeError` after the timeout."""
        store = _dist.PrefixStore("group", self._store)
        if self._backend == "gloo":
            options = _dist.ProcessGroupGloo._Options()
            options._devices = [_dist.ProcessGroupGloo.create_device(hostname=self._bind_address)]
            options._timeout = self._timeout
            self._group = _dist.ProcessGroupGloo(store, self.rank, self.world_size, options)
            return
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        with _environment(_NCCL_ENVIRONMENT):
            self._group = _dist.ProcessGroupNCCL(store, self.rank, self.world_size, options)
        # NCCL connects at its first collective: now, rather than while engines wait.
        self._broadcast(torch.zeros(1, dtype=torch.int64, device=self.device)).wait()

    def report(self, event: str, text: str = "") -> None:
        """Tell the others that this rank has reached `event`, with a text."""
        self._store.set(f"{event}/{self.rank}", text)

    def reports(self, event: str) -> dict[int, str]:
        """Rank above 0 -> its text, of those that have reported `event`."""
        ranks = [rank for rank in range(1, self.world_size) if self._store.check([f"{event}/{rank}"])]
        return {rank: self._store.get(f"{event}/{rank}").decode() for rank in ranks}

    def ranks_without(self, event: str, wait_s: float, keep_waiting: Callable[[], bool] = lambda: True) -> list[int]:
        """Ranks above 0 that have not reported `event` after at most `wait_s` seconds."""
        deadline = time.monotonic() + wait_s
        missing = list(range(1, self.world_size))
        while True:
            missing = [rank for rank in missing if not self._store.check([f"{event}/{rank}"])]
            if not missing or time.monotonic() >= deadline or not keep_waiting():
                return missing
            time.sleep(0.005)

    def send(self, packet: Packet) -> PendingPacket:
        """Begin to broadcast a packet from rank 0; raises `RuntimeError` when a peer is gone or the timeout passes."""
        data_bytes = packet.payload.numel() - packet.meta_bytes
        header = torch.tensor([packet.kind, packet.meta_bytes, data_bytes], dtype=torch.int64, device=self.device)
        works = [self._broadcast(header)]
        if packet.payload.numel():
            works.append(self._broadcast(packet.payload))
        return PendingPacket(works, [header, packet.payload])

    def receive(self) -> Packet:
        """Wait for the next packet of rank 0; raises `RuntimeError` when it is gone or the timeout passes."""
        header = torch.empty(_HEADER_FIELDS, dtype=torch.int64, device=self.device)
        self._broadcast(header).wait()
        kind, meta_bytes, data_bytes = header.tolist()
        payload = torch.empty(meta_bytes + data_bytes, dtype=torch.uint8, device=self.device)
        if payload.numel():
            self._broadcast(payload).wait()
        return Packet(PacketKind(kind), meta_bytes, payload)

    def close(self) -> None:
        """Leave the group and the store."""
        if self._group is not None and self._backend == "nccl":
            self._group.abort()
        self._group = None

    def _broadcast(self, tensor: torch.Tensor) -> Any:
        if self._group is None:
            raise RuntimeError("the weight transfer group is not connected")
        options = _dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        return self._group.broadcast([tensor], options)


class PendingPacket:
    """A packet on its way; its memory must not change before `wait` returns."""

    def __init__(self, works: list[Any], buffers: list[torch.Tensor]) -> None:
        self._works, self._buffers = works, buffers

    def wait(self) -> None:
        """Until it has been sent; raises `RuntimeError` when a peer is gone or the timeout passes."""
        for work in self._works:
            work.wait()
        self._buffers.clear()


def _current_gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for a moment."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
