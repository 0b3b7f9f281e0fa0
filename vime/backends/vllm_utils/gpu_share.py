"""Weights handed over in GPU memory that two processes of one machine share (CUDA IPC)."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from vime.backends.vllm_utils.digest import tensor_digests
from vime.backends.vllm_utils.packets import Packet, PacketKind, decode_tensors, encode_tensors
from vime.backends.vllm_utils.updates import LoadShared, SharedPart
from vime.errors import PublicationError

_storage: Any = torch.UntypedStorage


def gpu_uuid(device: torch.device) -> str:
    """Name of a GPU that doesn't depend on which GPUs a process sees."""
    return str(torch.cuda.get_device_properties(device).uuid)


class SharingBuffer:
    """Trainer side: one buffer on this process's GPU, filled with one part of the weights after the other."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """`num_bytes` is the size of the largest part, descriptions included."""
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        storage: Any = self._memory.untyped_storage()
        *fields, _ = storage._share_cuda_()
        fields.append(False)  # no reader has to wait for an event: a part is told of when it is complete
        self._handles = {gpu_uuid(device): _as_text(fields)}

    def fill(
        self, version: int, tensors: Sequence[tuple[str, torch.Tensor]], *, first: bool, last: bool
    ) -> dict[str, object]:
        """Put one part into the buffer; the engine's update request for it.

        The part before must have been loaded. Raises `PublicationError` when this one is larger than the buffer.
        """
        digests = tensor_digests([tensor for _, tensor in tensors], "sum64")
        packet = encode_tensors(tensors, digests, self._memory.device)
        size = packet.payload.numel()
        if size > self._memory.numel():
            raise PublicationError(
                f"A part of the weights has {size} bytes, the shared buffer {self._memory.numel()}.",
                next_step="Raise --update-weight-buffer-size to the size of the largest tensor.",
            )
        self._memory[:size] = packet.payload
        torch.cuda.synchronize(self._memory.device)
        update = LoadShared(version, self._handles, packet.meta_bytes, size, first, last)
        content: dict[str, object] = msgspec.to_builtins(update)
        return content


class SharedBuffers:
    """Engine side: buffers of trainers, opened once."""

    def __init__(self) -> None:
        self._opened: dict[str, torch.Tensor] = {}

    def part(self, update: SharedPart, device: torch.device) -> list[tuple[str, torch.Tensor]]:
        """Copies of the tensors in the buffer, on `device`, verified by their digests.

        Raises `PublicationError` when this process sees none of the GPUs, or when the bytes aren't those described.
        """
        payload = self._buffer(update)[: update.num_bytes].to(device, copy=True)
        return decode_tensors(Packet(PacketKind.DATA, update.meta_bytes, payload), "sum64")

    def _buffer(self, update: SharedPart) -> torch.Tensor:
        visible = {gpu_uuid(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())}
        uuid = next((uuid for uuid in update.handles if uuid in visible), None)
        if uuid is None:
            raise PublicationError(
                f"The weights are on GPU {', '.join(update.handles)}, this engine sees {', '.join(visible) or 'none'}.",
                next_step="Place trainer and engine on the same GPUs, or leave out --colocate.",
            )
        text = update.handles[uuid]
        if text not in self._opened:
            storage = _storage._new_shared_cuda(*_from_text(text, visible[uuid]))
            memory = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", visible[uuid]))
            self._opened = {text: memory.set_(storage)}
        return self._opened[text]


def _as_text(fields: Sequence[Any]) -> str:
    """The fields of a shared storage as JSON; bytes become base64 in a list of one."""
    return msgspec.json.encode(
        [[base64.b64encode(field).decode()] if isinstance(field, bytes) else field for field in fields]
    ).decode()


def _from_text(text: str, device_index: int) -> list[Any]:
    """Inverse of `_as_text`, with the GPU's number in this process."""
    fields = msgspec.json.decode(text, type=list[Any])
    return [device_index, *(base64.b64decode(field[0]) if isinstance(field, list) else field for field in fields[1:])]
