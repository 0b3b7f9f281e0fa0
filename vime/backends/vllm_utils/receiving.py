"""Engine side of a transfer, without vLLM: collect one publication in host memory and verify it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from vime.backends.vllm_utils.gloo_group import TransferGroup
from vime.backends.vllm_utils.packets import PacketKind, decode_abort, decode_end, decode_tensors
from vime.backends.vllm_utils.receipt import ReceiptBuilder, SendReceipt
from vime.errors import PublicationError


class GlooInit(msgspec.Struct, frozen=True):
    """Where the sender listens, and the rank of an engine's first worker in the group."""

    address: str
    port: int
    rank_offset: int
    world_size: int
    timeout_s: float = 60.0


def parse_gloo_init(info: dict[str, Any]) -> GlooInit:
    """Typed form of `GlooSender.init_info`; raises `PublicationError` when fields are missing or of a wrong type."""
    try:
        return msgspec.convert(info, GlooInit)
    except msgspec.ValidationError as error:
        raise PublicationError(f"The weight transfer can't be initialised from {info}: {error}.") from error


class GlooReceiver:
    """One worker's place in a sender's group."""

    def __init__(self, init: GlooInit, worker_rank: int) -> None:
        """Join the group; blocks until it stands. `worker_rank` counts the workers of this engine from 0."""
        rank = init.rank_offset + worker_rank
        self._group = TransferGroup(init.address, init.port, rank, init.world_size, init.timeout_s)
        self._group.report("joined")
        self._group.connect()
        self._num_updates = 0

    def receive(
        self, expected_names: Sequence[str] | None = None, expected_digest: str | None = None
    ) -> list[tuple[str, torch.Tensor]]:
        """Receive one publication: tensors in host memory, verified against the sender's digest.

        Raises `PublicationError` when anything is missing, repeated, reordered or damaged, or when the sender gave up;
        the group then stays in step and the next publication can follow. Raises `RuntimeError` when the sender is gone.
        """
        self._num_updates += 1
        event = f"update-{self._num_updates}"
        self._group.report(event)
        received = ReceiptBuilder()
        staged: list[tuple[str, torch.Tensor]] = []
        damage: PublicationError | None = None
        while (packet := self._group.receive()).kind is PacketKind.DATA:
            if damage is not None:
                continue  # read on, so that the group stays in step
            try:
                tensors = decode_tensors(packet)
                for name, tensor in tensors:
                    received.add(name, tensor)
                staged += tensors
            except PublicationError as error:
                damage = error
        self._group.report(f"{event}-done")
        if packet.kind is PacketKind.ABORT:
            raise PublicationError(f"The sender gave up: {decode_abort(packet).reason}.")
        if damage is not None:
            raise damage
        end = decode_end(packet)
        receipt = received.build()
        if receipt.digest != end.digest or len(receipt.names) != end.num_tensors:
            raise PublicationError(
                f"{len(receipt.names)} tensors arrived with digest {receipt.digest}, "
                f"{end.num_tensors} were sent with digest {end.digest}."
            )
        _check_announced(receipt, expected_names, expected_digest)
        return staged

    def close(self) -> None:
        """Leave the group."""
        self._group.close()


def _check_announced(receipt: SendReceipt, names: Sequence[str] | None, digest: str | None) -> None:
    if names is not None and receipt.names != list(names):
        missing, extra = set(names) - set(receipt.names), set(receipt.names) - set(names)
        detail = f"missing {sorted(missing)[:3]}, unexpected {sorted(extra)[:3]}"
        if not missing and not extra:
            detail = "in another order or repeated"
        raise PublicationError(f"{len(receipt.names)} tensors arrived, {len(names)} were announced: {detail}.")
    if digest is not None and receipt.digest != digest:
        raise PublicationError(f"The weights that arrived have digest {receipt.digest}, announced was {digest}.")
