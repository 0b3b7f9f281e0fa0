"""Moving the memory of tensors out of their device and back, without touching the tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch


@dataclass
class _Kept:
    """A storage, and the bytes that it has to get back; None where it comes back as zeros."""

    storage: torch.UntypedStorage
    num_bytes: int
    host: torch.Tensor | None


class HostMemory:
    """Takes the memory of tensors into host memory (pinned, beside a GPU) and gives it back bit by bit.

    Whole storages are moved, so that views (a parameter in a bucket, an optimizer's shard of it) stay views of the
    same storage. While they are out they have no memory, and must not be read. Host memory is kept between moves,
    because pinning it is slow.
    """

    def __init__(self) -> None:
        self._out: list[_Kept] = []
        self._buffers: dict[int, torch.Tensor] = {}
        self.is_out = False

    def move_out(self, kept: Iterable[torch.Tensor], cleared: Iterable[torch.Tensor] = ()) -> int:
        """Free the memory of all tensors; those of `cleared` come back as zeros. Returns the bytes freed.

        Does nothing when they are out already.
        """
        if self.is_out:
            return 0
        dropped, wanted = _storages(cleared), _storages(kept)
        for address, storage in {**wanted, **dropped}.items():
            host = self._copy(address, storage) if address in wanted else None
            self._out.append(_Kept(storage, storage.nbytes(), host))
        self._buffers = {address: self._buffers[address] for address in wanted}
        _wait()
        for item in self._out:
            item.storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.is_out = True
        return sum(item.num_bytes for item in self._out)

    def move_in(self) -> None:
        """Give all memory back; does nothing when it is in."""
        for item in self._out:
            item.storage.resize_(item.num_bytes)
            content = _bytes_of(item.storage)
            if item.host is None:
                content.zero_()
            else:
                content.copy_(item.host, non_blocking=True)
        _wait()
        self._out.clear()
        self.is_out = False

    def _copy(self, address: int, storage: torch.UntypedStorage) -> torch.Tensor:
        host = self._buffers.get(address)
        if host is None or host.numel() != storage.nbytes():
            pinned = storage.device.type == "cuda"
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
            self._buffers[address] = host
        return host.copy_(_bytes_of(storage), non_blocking=True)


def _storages(tensors: Iterable[torch.Tensor]) -> Mapping[int, torch.UntypedStorage]:
    """Each storage once, by the address of the object that all its views share.

    Those that a numpy array shares can't be freed; they are in host memory anyway.
    """
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage for storage in found if storage.nbytes() and storage.resizable()}


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
