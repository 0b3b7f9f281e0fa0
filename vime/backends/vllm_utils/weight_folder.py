"""Weights in a folder of safetensors files, as an engine reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vime.backends.vllm_utils.digest import WeightDigest
from vime.errors import PublicationError


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files in name order; `PublicationError` when there are none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise PublicationError(
            f"{folder} holds no *.safetensors files.", next_step="Check that engine and trainer see the same path."
        )
    return files


def weight_names(folder: Path) -> list[str]:
    """Names of all tensors in the folder, file by file in name order."""
    names: list[str] = []
    for path in weight_files(folder):
        handle: Any = safe_open(path, framework="pt")
        names += handle.keys()
    return names


def verify_weight_folder(folder: Path, names: Sequence[str], digest: str) -> None:
    """Read all tensors in the order of `names` and compare their digest.

    Raises `PublicationError` when a tensor is missing, extra, in two files, unreadable or different.
    """
    check = WeightDigest()
    for name, tensor in _read(folder, names):
        check.add(name, tensor)
    if check.hexdigest() != digest:
        raise PublicationError(f"{folder} has digest {check.hexdigest()}, expected {digest}.")


def read_weight_folder(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of the folder in the order of `names`, memory-mapped one at a time."""
    return _read(folder, names)


def _read(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        handles: list[Any] = [safe_open(path, framework="pt") for path in weight_files(folder)]
        owner: dict[str, int] = {}
        for number, handle in enumerate(handles):
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                if name in owner:
                    raise PublicationError(f"Tensor {name} is in two files of {folder}.")
                owner[name] = number
        if set(owner) != set(names) or len(names) != len(owner):
            missing, extra = sorted(set(names) - set(owner)), sorted(set(owner) - set(names))
            raise PublicationError(f"{folder}: missing tensors {missing[:5]}, unexpected tensors {extra[:5]}.")
        for name in names:
            yield name, handles[owner[name]].get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise PublicationError(f"{folder} can't be read: {error}.") from error
