"""Reading and writing Hugging Face checkpoints tensor by tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vime.errors import ModelError, reason_of

INDEX = "model.safetensors.index.json"
RECORD, EXPORT = "vime_conversion.json", "vime_export.json"
"""Files that say what wrote a checkpoint; not part of what is copied from one to the next."""
SHARD_BYTES = 4 << 30
_HEADER_BYTES = 256 << 10
"""Room for names and shapes at the start of each file; unused room is filled with spaces, as the format allows."""
_ENTRY_BYTES = 160
"""At most what an entry takes there beside the name."""
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")
_REOPEN_BYTES = 16 << 20
"""A file is mapped anew after this much was read from it: pages once read count as this process's memory."""


class SafetensorsReader:
    """Tensors of a checkpoint folder by name; one file is mapped at a time, and only what is asked for is read."""

    def __init__(self, checkpoint: Path) -> None:
        """List the tensors. Raises `ModelError` naming files that are absent or damaged."""
        self._paths = _shards(checkpoint)
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._open_path: Path | None = None
        self._open_file: Any = None
        self._bytes_read = 0
        for path in self._paths:
            file = self._opened(path)
            self._file_of.update(dict.fromkeys(file.keys(), path))
        _check_index(checkpoint, self._file_of)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(path.stat().st_size for path in self._paths)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._opened(self._file_of[name]).get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Raises `ModelError` for a dtype of compressed weights."""
        found = self._opened(self._file_of[name]).get_slice(name).get_dtype()
        dtypes = {text: dtype for dtype, text in _DTYPE_NAMES.items()}
        if found not in dtypes:
            raise ModelError(
                f"{self._file_of[name]}: {name} is {found}, allowed: {', '.join(dtypes)}.",
                next_step="Choose a checkpoint with uncompressed weights.",
            )
        return dtypes[found]

    def read(self, name: str) -> torch.Tensor:
        """The tensor in its stored dtype, on the CPU; its memory is its own."""
        if self._bytes_read > _REOPEN_BYTES:
            self._close_file()
        tensor: torch.Tensor = self._opened(self._file_of[name]).get_tensor(name).clone()
        self._bytes_read += tensor.nbytes
        return tensor

    def close(self) -> None:
        self._close_file()

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _opened(self, path: Path) -> Any:
        if self._open_path != path:
            self._close_file()
            try:
                file: Any = safe_open(path, framework="pt")
                self._open_file = file.__enter__()
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} can't be read: {error}", next_step="Download the file again.") from error
            self._open_path = path
        return self._open_file

    def _close_file(self) -> None:
        if self._open_file is not None:
            self._open_file.__exit__(None, None, None)
        self._open_file = self._open_path = None
        self._bytes_read = 0


def _shards(checkpoint: Path) -> list[Path]:
    paths = sorted(checkpoint.glob("*.safetensors"))
    absent = sorted(set(_weight_map(checkpoint).values()) - {path.name for path in paths})
    if absent:
        raise ModelError(
            f"{checkpoint}: {INDEX} names files that are absent: {', '.join(absent)}.",
            next_step="Download them, or the whole checkpoint again.",
        )
    if not paths:
        raise ModelError(
            f"{checkpoint} has no *.safetensors file.", next_step="Save the model with `save_pretrained` first."
        )
    return paths


def _check_index(checkpoint: Path, file_of: dict[str, Path]) -> None:
    wrong = sorted(name for name, file in _weight_map(checkpoint).items() if name not in file_of)
    if wrong:
        raise ModelError(
            f"{checkpoint}: {INDEX} names weights that its files lack: {', '.join(wrong[:16])}.",
            next_step="Download the checkpoint again.",
        )


def _weight_map(checkpoint: Path) -> dict[str, str]:
    path = checkpoint / INDEX
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text())["weight_map"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise ModelError(
            f"{path} has no weight_map: {reason_of(error)}.", next_step="Download the file again."
        ) from error


def write_checkpoint(weights: Iterable[tuple[str, torch.Tensor]], source: Path, target: Path) -> None:
    """Write weights as safetensors files of about 4 GiB, with configuration and tokenizer files of `source`.

    Each tensor is written before the next is taken, so that memory holds one.
    """
    target.mkdir(parents=True, exist_ok=True)
    for path in companions(source):
        shutil.copyfile(path, target / path.name)
    shards: list[_Shard] = []
    for name, tensor in weights:
        if not shards or not shards[-1].has_room(name, tensor):
            if shards:
                shards[-1].finish()
            shards.append(_Shard(target / f"part-{len(shards) + 1:05d}.safetensors"))
        shards[-1].append(name, tensor)
    if not shards:
        raise ModelError(f"{target}: there are no weights to write.")
    shards[-1].finish()
    _name_shards(shards, target)


class _Shard:
    """One file that is being written: room for the header, then the tensors one after the other."""

    def __init__(self, path: Path) -> None:
        self.path, self.num_bytes = path, 0
        self._entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._header_bytes = 0
        self._file = path.open("wb")
        self._file.seek(8 + _HEADER_BYTES)

    @property
    def names(self) -> list[str]:
        return [name for name in self._entries if name != "__metadata__"]

    def has_room(self, name: str, tensor: torch.Tensor) -> bool:
        fits_header = self._header_bytes + len(name) + _ENTRY_BYTES < _HEADER_BYTES
        is_empty = len(self._entries) == 1
        return is_empty or (fits_header and self.num_bytes + tensor.nbytes <= SHARD_BYTES)

    def append(self, name: str, tensor: torch.Tensor) -> None:
        begin, self.num_bytes = self.num_bytes, self.num_bytes + tensor.nbytes
        self._header_bytes += len(name) + _ENTRY_BYTES
        self._entries[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, self.num_bytes],
        }
        self._file.write(bytes_of(tensor))

    def finish(self) -> None:
        header = json.dumps(self._entries).encode()
        self._file.seek(0)
        self._file.write(_HEADER_BYTES.to_bytes(8, "little") + header.ljust(_HEADER_BYTES))
        self._file.close()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The numbers of a tensor as they lie in a file: contiguous, little-endian."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    numbers: Any = flat.view(torch.uint8).numpy()
    return memoryview(numbers)


def companions(checkpoint: Path) -> Iterator[Path]:
    """Configuration and tokenizer files of a checkpoint."""
    for pattern in _COPIED:
        yield from (path for path in sorted(checkpoint.glob(pattern)) if path.name not in (INDEX, RECORD, EXPORT))


def _name_shards(shards: list[_Shard], target: Path) -> None:
    if len(shards) == 1:
        shards[0].path.replace(target / "model.safetensors")
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard.path.replace(target / name)
        weight_map.update(dict.fromkeys(shard.names, name))
    total_bytes = sum(shard.num_bytes for shard in shards)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (target / INDEX).write_text(json.dumps(index, indent=2))
