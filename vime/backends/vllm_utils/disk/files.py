"""Safetensors files of published versions: durable writing, and tensors as bytes in place."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from vime.errors import PublicationError

_LENGTH_BYTES = 8
_MAX_HEADER = 1 << 28


@dataclass(frozen=True)
class StoredTensor:
    """Where the bytes of one tensor lie in a file: `[start, stop)`."""

    start: int
    stop: int


@dataclass(frozen=True)
class FileHeader:
    """Tensors of a safetensors file, and its metadata."""

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]


def write_file(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str]) -> int:
    """Write and sync a safetensors file of contiguous tensors in host memory; its size in bytes."""
    save_file(dict(tensors), path, metadata=dict(metadata))
    sync(path)
    return path.stat().st_size


def replace_file(path: Path, content: bytes) -> None:
    """Replace a small file, whole or not at all; it is not durable before its folder is synced."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    sync(temporary)
    temporary.replace(path)


def sync(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_header(path: Path) -> FileHeader:
    """Positions of a file's tensors; `PublicationError` when the file can't be read or is too short for them."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            content = file.read(min(length, _MAX_HEADER))
        size = path.stat().st_size
        fields: dict[str, Any] = json.loads(content)
        first = _LENGTH_BYTES + length
        metadata = fields.pop("__metadata__", {})
        offsets = {name: entry["data_offsets"] for name, entry in fields.items()}
        tensors = {name: StoredTensor(first + start, first + stop) for name, (start, stop) in offsets.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PublicationError(f"{path} can't be read: {error}.", next_step="Publish again.") from error
    if any(not first <= tensor.start <= tensor.stop <= size for tensor in tensors.values()):
        raise PublicationError(f"{path} has {size} bytes, its tensors need more.", next_step="Publish again.")
    return FileHeader(tensors, metadata)


def map_file(path: Path, *, writable: bool = False) -> np.memmap[Any, np.dtype[np.uint8]]:
    """The file's bytes, memory-mapped."""
    return np.memmap(path, np.uint8, "r+" if writable else "r")
