"""Engine side of a group transfer, without vLLM: receive one publication and verify it."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from vime.backends.vllm_utils.digest import DigestKind
from vime.backends.vllm_utils.packets import Packet, PacketKind, decode_abort, decode_end, decode_verified
from vime.backends.vllm_utils.receipt import ReceiptBuilder
from vime.backends.vllm_utils.transfer_group import GroupBackend, TransferGroup
from vime.errors import PublicationError

NamedTensors = list[tuple[str, torch.Tensor]]


class GroupInit(msgspec.Struct, frozen=True):
    """Where the sender listens, and the rank of an engine's first worker in the group."""

    address: str
    port: int
    rank_offset: int
    world_size: int
    timeout_s: float = 60.0
    backend: GroupBackend = "gloo"
    digest: DigestKind = "xxh3-128"


def parse_group_init(info: dict[str, Any]) -> GroupInit:
    """Typed form of `WeightSender.init_info`; raises `PublicationError` when fields are missing or of a wrong type."""
    try:
        return msgspec.convert(info, GroupInit)
    except msgspec.ValidationError as error:
        raise PublicationError(f"The weight transfer can't be initialised from {info}: {error}.") from error


class WeightReceiver:
    """One worker's place in a sender's group."""

    def __init__(self, init: GroupInit, worker_rank: int, device: torch.device | None = None) -> None:
        """Join the group; blocks until it stands. `worker_rank` counts the workers of this engine from 0.

        `device` is the worker's GPU, for a group over NCCL.

        Raises `PublicationError` when the sender isn't there, or the group doesn't stand within the timeout.
        """
        rank = init.rank_offset + worker_rank
        self._kind = init.digest
        self._num_updates = 0
        try:
            self._group = TransferGroup(
                init.address, init.port, rank, init.world_size, init.timeout_s, backend=init.backend, device=device
            )
            self._group.report("joined")
            self._group.connect()
        except (dist.DistError, RuntimeError) as error:
            raise PublicationError(
                f"The weight sender at {init.address}:{init.port} can't be joined: {error}."
            ) from error

    def receive(self) -> NamedTensors:
        """Receive one publication whole: its tensors, verified.

        Raises `PublicationError` when anything is missing, repeated, reordered or damaged, or when the sender gave up;
        the group then stays in step and the next publication can follow. Raises `PublicationError` too when the sender
        is gone; the group is then of no use any more.
        """
        return [item for part in self.stream() for item in part]

    def stream(self) -> Generator[NamedTensors]:
        """The publication part by part, each verified by the digests of its tensors; errors as of `receive`.

        Whether it is complete is known only at the end. The sender is told the outcome when the iterator ends, so
        it must be read to its end; an error of the reader is told by closing it.
        """
        self._num_updates += 1
        event = f"update-{self._num_updates}"
        outcome = "the engine gave up"
        try:
            self._group.report(event)
            yield from self._parts()
            outcome = ""
        except PublicationError as error:
            outcome = error.message
            raise
        except GeneratorExit:
            self._skip_rest()
            raise
        except (RuntimeError, dist.DistError) as error:
            outcome = f"the transfer broke: {error}"
            raise PublicationError(f"The weight transfer broke: {error}.") from error
        finally:
            self._report_outcome(f"{event}-done", outcome)

    def close(self) -> None:
        """Leave the group."""
        self._group.close()

    def _parts(self) -> Iterator[NamedTensors]:
        received = ReceiptBuilder(self._kind)
        while (packet := self._group.receive()).kind is PacketKind.DATA:
            try:
                tensors, digests = decode_verified(packet, self._kind)
                received.add_all(tensors, digests)
            except PublicationError:
                self._skip_rest()
                raise
            yield tensors
        _check_end(packet, received)

    def _skip_rest(self) -> None:
        """Read on, so that the group stays in step."""
        while self._group.receive().kind is PacketKind.DATA:
            pass

    def _report_outcome(self, event: str, outcome: str) -> None:
        try:
            self._group.report(event, outcome)
        except (RuntimeError, dist.DistError):
            return  # the sender is gone; nobody is left to be told


def _check_end(packet: Packet, received: ReceiptBuilder) -> None:
    if packet.kind is PacketKind.ABORT:
        raise PublicationError(f"The sender gave up: {decode_abort(packet).reason}.")
    end, receipt = decode_end(packet), received.build()
    if receipt.digest != end.digest or len(receipt.names) != end.num_tensors:
        raise PublicationError(
            f"{len(receipt.names)} tensors arrived with digest {receipt.digest}, "
            f"{end.num_tensors} were sent with digest {end.digest}."
        )
