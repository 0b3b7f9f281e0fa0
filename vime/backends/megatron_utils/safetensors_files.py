"""Reading and writing Hugging Face checkpoints tensor by tensor."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vime.errors import ModelError

_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")
SHARD_BYTES = 4 << 30


class SafetensorsReader:
    """Tensors of a checkpoint folder by name; files are mapped, and only the tensors asked for are read."""

    def __init__(self, checkpoint: Path) -> None:
        self._stack = contextlib.ExitStack()
        self._file_of: dict[str, Any] = {}
        paths = sorted(checkpoint.glob("*.safetensors"))
        if not paths:
            raise ModelError(f"{checkpoint} has no *.safetensors file.", next_step="Convert the checkpoint first.")
        for path in paths:
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                self._stack.close()
                raise ModelError(f"{path} can't be read: {error}", next_step="Download the file again.") from error
            self._file_of.update(dict.fromkeys(file.keys(), file))

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        """The tensor in its stored dtype, on the CPU."""
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def write_checkpoint(weights: Iterable[tuple[str, torch.Tensor]], source: Path, target: Path) -> None:
    """Write weights as safetensors files of at most 4 GiB, with configuration and tokenizer files of `source`."""
    target.mkdir(parents=True, exist_ok=True)
    for pattern in _COPIED:
        for path in source.glob(pattern):
            if path.name != "model.safetensors.index.json":
                shutil.copyfile(path, target / path.name)
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    total = size = 0

    def flush() -> None:
        save_file(pending, target / f"part-{len(shards) + 1:05d}.safetensors", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in weights:
        bytes_added = tensor.numel() * tensor.element_size()
        if pending and size + bytes_added > SHARD_BYTES:
            flush()
            size = 0
        pending[name] = tensor.detach().cpu().contiguous().clone()
        size += bytes_added
        total += bytes_added
    flush()
    _name_shards(shards, total, target)


def _name_shards(shards: list[list[str]], total_bytes: int, target: Path) -> None:
    if len(shards) == 1:
        (target / "part-00001.safetensors").replace(target / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (target / f"part-{number:05d}.safetensors").replace(target / name)
        weight_map.update(dict.fromkeys(names, name))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
