"""Reading and writing `torch_dist` checkpoints (torch's distributed checkpoint format) tensor by tensor.

Needs neither a model nor other ranks. Nothing but the format's own classes is unpickled.
"""

from __future__ import annotations

import io
import itertools
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from vime.backends.megatron_utils.weight_source import METADATA
from vime.errors import ModelError

FILE_BYTES = 4 << 30
_MODULES = ("torch.distributed.checkpoint.", "torch.distributed._shard.")
_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("builtins", "set"),
    ("pathlib", "PosixPath"),
    # Empty classes that older Megatron versions left in the file.
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if "." in name or not (is_dtype or (module, name) in _NAMES or module.startswith(_MODULES)):
            raise pickle.UnpicklingError(f"{module}.{name} is not part of the format")
        return super().find_class(module, name)


class TorchDistReader:
    """The tensors of one checkpoint folder, whole or in parts, whatever ranks wrote them."""

    def __init__(self, folder: Path) -> None:
        """Read the table of contents. Raises `ModelError` naming the file when it is absent or damaged."""
        self.folder = folder
        path = folder / METADATA
        try:
            with path.open("rb") as file:
                metadata: Metadata = _Unpickler(file).load()
        except (OSError, pickle.UnpicklingError, AttributeError, EOFError, ImportError) as error:
            raise ModelError(f"{path} can't be read: {error}.", next_step="Copy the checkpoint again.") from error
        contents = metadata.state_dict_metadata.items()
        self._tensors = {key: entry for key, entry in contents if isinstance(entry, TensorStorageMetadata)}
        self._places: dict[Any, _StorageInfo] = metadata.storage_data
        absent = sorted(name for name in self._file_names() if not (folder / name).is_file())
        if absent:
            raise ModelError(
                f"{folder}: {METADATA} names files that are absent: {', '.join(absent)}.",
                next_step="Copy the checkpoint again.",
            )

    @property
    def tensor_keys(self) -> frozenset[str]:
        return frozenset(self._tensors)

    @property
    def num_bytes(self) -> int:
        return sum((self.folder / name).stat().st_size for name in self._file_names())

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        return self._tensors[key].properties.dtype

    def read(self, key: str, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        """The part of a tensor that begins at `offset`, in its stored dtype. Raises `ModelError` for damaged bytes."""
        entry = self._tensors[key]
        part = torch.empty(tuple(size), dtype=entry.properties.dtype)
        found = 0
        for chunk in entry.chunks:
            overlap = [
                (max(start, begin), min(start + length, begin + extent))
                for start, length, begin, extent in zip(offset, size, chunk.offsets, chunk.sizes, strict=True)
            ]
            if all(start < end for start, end in overlap):
                own = self._read_chunk(key, chunk)
                source, target = (
                    tuple(
                        slice(start - begin, end - begin) for (start, end), begin in zip(overlap, begins, strict=True)
                    )
                    for begins in (chunk.offsets, offset)
                )
                part[target] = own[source]
                found += part[target].numel()
        if found != part.numel():
            raise ModelError(f"{self.folder}: {key} holds {found} of {part.numel()} numbers that are needed of it.")
        return part

    def _read_chunk(self, key: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        place = self._places[MetadataIndex(key, chunk.offsets)]
        path = self.folder / place.relative_path
        with path.open("rb") as file:
            file.seek(place.offset)
            content = file.read(place.length)
        try:
            tensor: torch.Tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise ModelError(
                f"{path}: {key} at byte {place.offset} can't be read: {str(error).splitlines()[0]}.",
                next_step="Copy the checkpoint again.",
            ) from error
        return tensor.reshape(tuple(chunk.sizes))

    def _file_names(self) -> set[str]:
        return {place.relative_path for place in self._places.values()}


class TorchDistWriter:
    """Writes one checkpoint as one rank would, each tensor when it is given."""

    def __init__(self, folder: Path) -> None:
        """Begin in an existing, empty folder."""
        self._folder = folder
        self._contents: dict[str, Any] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._numbers = itertools.count()
        self._begin_file()

    def add_part(self, key: str, whole: Sequence[int], offset: Sequence[int], part: torch.Tensor) -> None:
        """Write the part of a tensor of shape `whole` that begins at `offset`."""
        entry = self._contents.setdefault(
            key, TensorStorageMetadata(TensorProperties(dtype=part.dtype), torch.Size(whole), [])
        )
        if entry.properties.dtype != part.dtype:
            raise ModelError(
                f"{key} has the dtypes {entry.properties.dtype} and {part.dtype}, allowed in one model: one.",
                next_step="Save the model in one dtype.",
            )
        chunk = ChunkStorageMetadata(torch.Size(offset), part.shape)
        entry.chunks.append(chunk)
        index = MetadataIndex(key, chunk.offsets, len(entry.chunks) - 1)
        self._places[index] = self._write(lambda: torch.save(part.clone(), self._file))  # a view would be saved whole

    def add_object(self, key: str, content: bytes) -> None:
        """Write bytes that aren't a tensor."""
        self._contents[key] = BytesStorageMetadata()
        self._places[MetadataIndex(key)] = self._write(lambda: self._file.write(content))

    def finish(self) -> None:
        """Write the table of contents."""
        self._file.close()
        metadata = Metadata(self._contents, storage_data=self._places)
        (self._folder / METADATA).write_bytes(pickle.dumps(metadata))
        config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        (self._folder / "metadata.json").write_text(json.dumps(config))

    def _write(self, write: Any) -> _StorageInfo:
        if self._file.tell() > FILE_BYTES:
            self._file.close()
            self._begin_file()
        start = self._file.tell()
        write()
        return _StorageInfo(self._name, start, self._file.tell() - start)

    def _begin_file(self) -> None:
        self._name = f"__0_{next(self._numbers)}.distcp"
        self._file: IO[bytes] = (self._folder / self._name).open("wb")
