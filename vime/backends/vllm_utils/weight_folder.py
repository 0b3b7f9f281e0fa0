"""Weights in a folder of safetensors files, for the disk transport."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vime.backends.vllm_utils.digest import WeightDigest
from vime.backends.vllm_utils.packets import collect_packets
from vime.backends.vllm_utils.receipt import ReceiptBuilder, SendReceipt
from vime.errors import PublicationError

FILE_BYTES = 2 << 30
"""Tensors are collected into files of about this size."""


def write_weight_folder(
    named_tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, *, file_bytes: int = FILE_BYTES
) -> SendReceipt:
    """Write a new folder of safetensors files, each synced and then renamed, and return its receipt.

    Raises `PublicationError` when the folder exists already or can't be written.
    """
    receipt = ReceiptBuilder()
    try:
        folder.mkdir(parents=True)
        for number, tensors in enumerate(collect_packets(named_tensors, file_bytes), start=1):
            for name, tensor in tensors:
                receipt.add(name, tensor)
            host = {name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in tensors}
            _write_durably(host, folder / f"model-{number:05d}.safetensors")
        _sync(folder)
    except OSError as error:
        raise PublicationError(
            f"Weights can't be written to {folder}: {error}.", next_step="Give a new folder with enough space."
        ) from error
    return receipt.build()


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


def _write_durably(tensors: dict[str, torch.Tensor], path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary)
    _sync(temporary)
    temporary.rename(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
