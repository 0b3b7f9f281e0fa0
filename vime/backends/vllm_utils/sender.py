"""Trainer side of a weight publication over a process group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from vime.backends.vllm_utils.digest import DigestKind
from vime.backends.vllm_utils.packets import (
    AbortMeta,
    EndMeta,
    Packet,
    PacketKind,
    collect_packets,
    encode_message,
    encode_tensors,
)
from vime.backends.vllm_utils.receipt import ReceiptBuilder, SendReceipt
from vime.backends.vllm_utils.transfer_group import GroupBackend, PendingPacket, TransferGroup
from vime.errors import PublicationError

PACKET_BYTES = 64 << 20
"""Tensors are collected up to this size; a larger tensor is a packet of its own."""


class WeightSender:
    """Sends weights from one trainer process to the workers of one or more engines. Blocking; not thread-safe.

    A publication, with the engine calls of `vime.backends.vllm_utils.client.EngineClient` beside it:

        sender = WeightSender("127.0.0.1", 0, world_size=2, engine_names=["http://127.0.0.1:8000"])
        client.init_weight_transfer(sender.init_info(rank_offset=1)), then sender.connect()
        for each version, while the engine samples: client.stage_weights(FromGroup(version)), then
        receipt = sender.send(named_tensors); and, while it is paused, client.load_staged(version) and
        client.finish_weight_update(version)

    Tensors are gathered while the packet before is on its way. Digests are computed while the tensors stream by, so
    the weights are read once. After a failed `send` the group is `broken`; close this sender and build a new one.
    """

    def __init__(
        self,
        address: str,
        port: int,
        world_size: int,
        *,
        engine_names: Sequence[str] = (),
        timeout_s: float = 60.0,
        packet_bytes: int = PACKET_BYTES,
        backend: GroupBackend = "gloo",
        digest: DigestKind | None = None,
    ) -> None:
        """Listen on `address:port` (port 0: chosen by the system, see `port`).

        `world_size` counts this process and every engine worker; `engine_names` has one entry per worker, in rank
        order from 1, and is used in messages. `digest` None: the one that fits the memory of the backend. Raises
        `PublicationError` when the port can't be used.
        """
        self.address = address
        self.world_size = world_size
        self.broken = False
        self._engine_names = list(engine_names)
        self._timeout_s = timeout_s
        self._packet_bytes = packet_bytes
        self._backend = backend
        self._digest: DigestKind = digest or ("xxh3-128" if backend == "gloo" else "sum64")
        self._num_sends = 0
        self._pending: PendingPacket | None = None
        try:
            self._group = TransferGroup(address, port, 0, world_size, timeout_s, backend=backend)
        except (dist.DistError, RuntimeError, OSError) as error:
            raise PublicationError(
                f"The weight sender can't listen on {address}:{port}: {error}.",
                next_step="Choose an address of this machine and port 0.",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def port(self) -> int:
        """The port that engines must reach."""
        return self._group.port

    def init_info(self, rank_offset: int) -> dict[str, object]:
        """Body of `EngineClient.init_weight_transfer` for the engine whose first worker has rank `rank_offset`."""
        group = {
            "address": self.address,
            "port": self.port,
            "rank_offset": rank_offset,
            "world_size": self.world_size,
            "timeout_s": self._timeout_s,
            "backend": self._backend,
            "digest": self._digest,
        }
        return {"group": group}

    def connect(self) -> None:
        """Wait until every engine worker has joined; raises `PublicationError` naming those that have not."""
        missing = self._group.ranks_without("joined", self._timeout_s)
        if missing:
            self.broken = True
            raise PublicationError(
                f"{self._names(missing)} did not join the weight transfer at {self.address}:{self.port} "
                f"within {self._timeout_s:g} s.",
                next_step="Check that the engine is alive and can reach this address, then publish again.",
                engines=self._by_name(dict.fromkeys(missing, "did not join the weight transfer")),
            )
        try:
            self._group.connect()
        except RuntimeError as error:
            self._fail("connecting", "connected", error)

    def send(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> SendReceipt:
        """Stream checkpoint-named tensors (any device; types of `digest.WEIGHT_DTYPES`) to all engines.

        Returns when every engine has them whole and verified. Raises `PublicationError` naming the engines concerned;
        the error of a failing iterable passes through after the engines have been told to give the update up.
        """
        if self.broken:
            raise PublicationError(
                "This weight sender is broken by an earlier failure.", next_step="Close it and connect a new one."
            )
        self._num_sends += 1
        event = f"update-{self._num_sends}"
        missing = self._group.ranks_without(event, self._timeout_s)
        if missing:
            self.broken = True
            raise PublicationError(
                f"{self._names(missing)} did not start receiving weights within {self._timeout_s:g} s.",
                next_step="Check that the engine is alive and that its update request was sent.",
                engines=self._by_name(dict.fromkeys(missing, "did not start receiving weights")),
            )
        receipt = self._stream(named_tensors)
        self._hear_outcomes(f"{event}-done")
        return receipt

    def close(self) -> None:
        """Leave the group. Engines notice at their next update."""
        self._group.close()

    def _stream(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> SendReceipt:
        receipt = ReceiptBuilder(self._digest)
        sent = False
        try:
            for tensors in collect_packets(named_tensors, self._packet_bytes):
                self._broadcast(self._encode(tensors, receipt.add_all(tensors)))
            done = receipt.build()
            end = EndMeta(done.digest, len(done.names), done.num_bytes)
            self._broadcast(encode_message(PacketKind.END, end, self._group.device))
            self._flush()
            sent = True
        finally:
            if not sent and not self.broken:
                abort = AbortMeta("the trainer failed while sending")
                self._broadcast(encode_message(PacketKind.ABORT, abort, self._group.device))
                self._flush()
        return done

    def _encode(self, tensors: list[tuple[str, torch.Tensor]], digests: Sequence[str]) -> Packet:
        return encode_tensors(tensors, digests, self._group.device)

    def _broadcast(self, packet: Packet) -> None:
        """Send a packet as soon as the one before has left."""
        self._flush()
        try:
            self._pending = self._group.send(packet)
        except RuntimeError as error:
            self._fail("sending weights", f"update-{self._num_sends}-done", error)

    def _flush(self) -> None:
        if self._pending is None:
            return
        try:
            self._pending.wait()
        except RuntimeError as error:
            self._fail("sending weights", f"update-{self._num_sends}-done", error)
        self._pending = None

    def _hear_outcomes(self, event: str) -> None:
        missing = self._group.ranks_without(event, self._timeout_s)
        refused = {rank: text for rank, text in self._group.reports(event).items() if text}
        if missing:
            self.broken = True
            refused |= dict.fromkeys(missing, f"no answer within {self._timeout_s:g} s")
        if refused:
            engines = self._by_name(refused)
            reasons = "; ".join(f"{name}: {text}" for name, text in engines.items())
            raise PublicationError(f"Weights were refused by {reasons}", next_step="Publish again.", engines=engines)

    def _fail(self, doing: str, event: str, error: RuntimeError) -> None:
        self.broken = True
        self._pending = None
        missing = self._group.ranks_without(event, 0.0)
        raise PublicationError(
            f"The weight transfer failed while {doing}; not finished: {self._names(missing)} ({error}).",
            next_step="Fence these engines, connect a new sender and publish again.",
            engines=self._by_name(dict.fromkeys(missing, f"did not finish ({error})")),
        ) from error

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(dict.fromkeys(map(self._name, ranks))) or "no engine"

    def _by_name(self, reasons: Mapping[int, str]) -> dict[str, str]:
        return {self._name(rank): reason for rank, reason in sorted(reasons.items())}

    def _name(self, rank: int) -> str:
        known = rank <= len(self._engine_names)
        return self._engine_names[rank - 1] if known else f"engine worker of rank {rank}"
