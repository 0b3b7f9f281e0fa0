"""Reading and writing one rank's file of a `torch` checkpoint tensor by tensor, without the others in memory."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vime.backends.megatron_utils.safetensors_files import bytes_of
from vime.errors import ModelError


class RankFile:
    """Everything in a file but the numbers, which are read and written in their place. A context manager."""

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        """Read what the file says of its tensors; only classes that Megatron calls safe are made.

        Raises:
            ModelError: the file is absent, damaged, or holds another class.
        """
        self.path = path
        try:
            self.state: dict[str, Any] = torch.load(path, map_location="meta", weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise ModelError(
                f"{path} can't be read: {str(error).splitlines()[0]}.", next_step="Copy the checkpoint again."
            ) from error
        self._descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)

    def read(self, like: torch.Tensor) -> torch.Tensor:
        """The numbers of one of the tensors in `state`, on the CPU."""
        if not like.is_contiguous():
            raise ModelError(f"{self.path}: a tensor is stored with strides {like.stride()}, allowed: contiguous.")
        content = bytearray(like.nbytes)
        view, done = memoryview(content), 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], self._place(like) + done)
            if not count:
                raise ModelError(f"{self.path} ends before byte {self._place(like) + like.nbytes}.")
            done += count
        if not content:
            return torch.empty(like.shape, dtype=like.dtype)
        return torch.frombuffer(content, dtype=like.dtype).reshape(like.shape)

    def write(self, like: torch.Tensor, numbers: torch.Tensor) -> None:
        """Fill in the numbers of one of the tensors in `state`, of the same shape and dtype."""
        view, done = bytes_of(numbers), 0
        while done < len(view):
            done += os.pwrite(self._descriptor, view[done:], self._place(like) + done)

    def _place(self, like: torch.Tensor) -> int:
        storage: Any = like.untyped_storage()
        return int(storage._checkpoint_offset) + int(like.storage_offset()) * like.element_size()

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> RankFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_frame(path: Path, state: dict[str, Any], tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Write a file whose `model` has room for `tensors` (shape and dtype by name), to be filled through `RankFile`.

    Checksums of the zip file stay those of zeros; torch doesn't look at them.
    """
    path.parent.mkdir(parents=True)
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        model = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in tensors.items()}
        torch.save({**state, "model": {**state["model"], **model}}, path)
