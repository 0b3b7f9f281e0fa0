"""A gloo process group of our own between one trainer process (rank 0) and engine workers (ranks 1 and up).

It never touches `torch.distributed`'s default group, which belongs to the trainer or to vLLM. The store carries
short status keys too, so that a failure can be told apart by rank.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from vime.backends.vllm_utils.packets import Packet, PacketKind

_HEADER_FIELDS = 3
_dist: Any = torch.distributed  # stores and process groups have no complete type stubs


def local_address_towards(address: str, port: int) -> str:
    """The address of this machine's interface that reaches `address`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port or 1))
        return str(probe.getsockname()[0])


class TransferGroup:
    """Packets from rank 0 to all other ranks, with status keys. Not thread-safe; close it with `close()`."""

    def __init__(self, address: str, port: int, rank: int, world_size: int, timeout_s: float) -> None:
        """Open the store (rank 0 listens; port 0 lets the system choose). The group is joined by `connect()`.

        Raises `torch.distributed.DistError` when the store can't be reached within `timeout_s`.
        """
        self.rank = rank
        self.world_size = world_size
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
        options = _dist.ProcessGroupGloo._Options()
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname=self._bind_address)]
        options._timeout = self._timeout
        store = _dist.PrefixStore("group", self._store)
        self._group = _dist.ProcessGroupGloo(store, self.rank, self.world_size, options)

    def report(self, event: str) -> None:
        """Tell the others that this rank has reached `event`."""
        self._store.set(f"{event}/{self.rank}", "1")

    def ranks_without(self, event: str, wait_s: float, keep_waiting: Callable[[], bool] = lambda: True) -> list[int]:
        """Ranks above 0 that have not reported `event` after at most `wait_s` seconds."""
        deadline = time.monotonic() + wait_s
        missing = list(range(1, self.world_size))
        while True:
            missing = [rank for rank in missing if not self._store.check([f"{event}/{rank}"])]
            if not missing or time.monotonic() >= deadline or not keep_waiting():
                return missing
            time.sleep(0.005)

    def send(self, packet: Packet) -> None:
        """Broadcast a packet from rank 0; raises `RuntimeError` when a peer is gone or the timeout passes."""
        data_bytes = packet.payload.numel() - packet.meta_bytes
        self._broadcast(torch.tensor([packet.kind, packet.meta_bytes, data_bytes], dtype=torch.int64))
        if packet.payload.numel():
            self._broadcast(packet.payload)

    def receive(self) -> Packet:
        """Wait for the next packet of rank 0; raises `RuntimeError` when it is gone or the timeout passes."""
        header = torch.empty(_HEADER_FIELDS, dtype=torch.int64)
        self._broadcast(header)
        kind, meta_bytes, data_bytes = (int(value) for value in header)
        payload = torch.empty(meta_bytes + data_bytes, dtype=torch.uint8)
        if payload.numel():
            self._broadcast(payload)
        return Packet(PacketKind(kind), meta_bytes, payload)

    def close(self) -> None:
        """Leave the group and the store."""
        self._group = None

    def _broadcast(self, tensor: torch.Tensor) -> None:
        if self._group is None:
            raise RuntimeError("the weight transfer group is not connected")
        options = _dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        self._group.broadcast([tensor], options).wait()
