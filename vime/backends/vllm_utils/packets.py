"""How weights travel over a process group: self-describing packets, closed by a digest.

Sender and receivers agree on nothing beforehand but the group. A transfer is a run of DATA packets, each with the
names, types, shapes and digests of its tensors and then their bytes, and one END packet with the digest of everything
sent. A sender that fails half-way sends ABORT, so that receivers stop at once and the group stays in step.

Every packet is one int64 `[kind, meta_bytes, data_bytes]` broadcast and, if it isn't empty, one uint8 broadcast.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import torch

from vime.backends.vllm_utils.digest import WEIGHT_DTYPES, DigestKind, dtype_name, flat_bytes, tensor_digests
from vime.errors import PublicationError

_ALIGNMENT = 16
_HOST = torch.device("cpu")
_Meta = TypeVar("_Meta", bound=msgspec.Struct)


class PacketKind(enum.IntEnum):
    DATA = 1
    END = 2
    ABORT = 3


class TensorMeta(msgspec.Struct, frozen=True):
    """Description of one tensor: checkpoint name, wire name of the element type, shape, digest of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str


class DataMeta(msgspec.Struct, frozen=True):
    """First part of a DATA packet. Tensor bytes follow in this order, each padded to 16 bytes."""

    tensors: list[TensorMeta]


class EndMeta(msgspec.Struct, frozen=True):
    """The END packet: what the receiver must have got by now."""

    digest: str
    num_tensors: int
    num_bytes: int


class AbortMeta(msgspec.Struct, frozen=True):
    """The ABORT packet: why the sender gave up."""

    reason: str


@dataclass(frozen=True)
class Packet:
    """`kind`, its encoded description and the padded tensor bytes (uint8 `[meta_bytes + data_bytes]`, any device)."""

    kind: PacketKind
    meta_bytes: int
    payload: torch.Tensor


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def encode_message(kind: PacketKind, meta: EndMeta | AbortMeta, device: torch.device = _HOST) -> Packet:
    """Encode a packet without tensors."""
    encoded = msgspec.json.encode(meta)
    return Packet(kind, len(encoded), torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(device))


def encode_tensors(
    tensors: Sequence[tuple[str, torch.Tensor]], digests: Sequence[str], device: torch.device = _HOST
) -> Packet:
    """Copy the tensors into one packet on `device`."""
    described = zip(tensors, digests, strict=True)
    metas = [TensorMeta(name, dtype_name(tensor), tuple(tensor.shape), digest) for (name, tensor), digest in described]
    encoded = msgspec.json.encode(DataMeta(metas))
    encoded += b" " * (_padded(len(encoded)) - len(encoded))
    sizes = [_padded(tensor.numel() * tensor.element_size()) for _, tensor in tensors]
    payload = torch.zeros(len(encoded) + sum(sizes), dtype=torch.uint8, device=device)
    payload[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    offset = len(encoded)
    for (_, tensor), size in zip(tensors, sizes, strict=True):
        data = flat_bytes(tensor)
        payload[offset : offset + data.numel()] = data
        offset += size
    return Packet(PacketKind.DATA, len(encoded), payload)


def collect_packets(
    named_tensors: Iterable[tuple[str, torch.Tensor]], packet_bytes: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Group consecutive tensors up to `packet_bytes`, keeping their order."""
    group: list[tuple[str, torch.Tensor]] = []
    group_bytes = 0
    for name, tensor in named_tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if group and group_bytes + num_bytes > packet_bytes:
            yield group
            group, group_bytes = [], 0
        group.append((name, tensor))
        group_bytes += num_bytes
    if group:
        yield group


def decode_tensors(packet: Packet, kind: DigestKind = "xxh3-128") -> list[tuple[str, torch.Tensor]]:
    """Views into the packet's payload, by name; errors as of `decode_verified`."""
    return decode_verified(packet, kind)[0]


def decode_verified(packet: Packet, kind: DigestKind) -> tuple[list[tuple[str, torch.Tensor]], list[str]]:
    """(views into the packet's payload by name, the digests that were found true).

    Raises `PublicationError` when description and bytes disagree: in size, or in the digest of a tensor.
    """
    meta = _decode(packet, DataMeta)
    tensors: list[tuple[str, torch.Tensor]] = []
    offset = packet.meta_bytes
    for item in meta.tensors:
        dtype = WEIGHT_DTYPES.get(item.dtype)
        if dtype is None or any(size < 0 for size in item.shape):
            raise PublicationError(
                f"Tensor {item.name} arrived as {item.dtype}{list(item.shape)}, which can't be read."
            )
        numel = 1
        for size in item.shape:
            numel *= size
        num_bytes = numel * dtype.itemsize
        if offset + num_bytes > packet.payload.numel():
            raise PublicationError(
                f"Tensor {item.name} needs {num_bytes} bytes, {packet.payload.numel() - offset} are left in its packet."
            )
        tensors.append((item.name, packet.payload[offset : offset + num_bytes].view(dtype).reshape(item.shape)))
        offset += _padded(num_bytes)
    if offset != packet.payload.numel():
        raise PublicationError(f"A packet has {packet.payload.numel() - offset} bytes that no tensor accounts for.")
    digests = tensor_digests([tensor for _, tensor in tensors], kind)
    for item, digest in zip(meta.tensors, digests, strict=True):
        if digest != item.digest:
            raise PublicationError(f"Tensor {item.name} arrived with digest {digest}, sent was {item.digest}.")
    return tensors, digests


def decode_end(packet: Packet) -> EndMeta:
    """The closing message of a transfer."""
    return _decode(packet, EndMeta)


def decode_abort(packet: Packet) -> AbortMeta:
    """The sender's reason for giving up."""
    return _decode(packet, AbortMeta)


def _decode(packet: Packet, meta_type: type[_Meta]) -> _Meta:
    try:
        return msgspec.json.decode(packet.payload[: packet.meta_bytes].cpu().numpy().tobytes(), type=meta_type)
    except msgspec.DecodeError as error:
        raise PublicationError(f"The description of a weight packet can't be read: {error}.") from error
