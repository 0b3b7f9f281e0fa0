"""Trainer side of the disk transport: writes each version whole, or as the difference from the one before."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch

from vime.backends.vllm_utils.digest import dtype_name, flat_bytes
from vime.backends.vllm_utils.disk.checksum import checksum
from vime.backends.vllm_utils.disk.codec import COMPRESSION, Bytes, Encoding, encode_change
from vime.backends.vllm_utils.disk.files import replace_file, sync, write_file
from vime.backends.vllm_utils.disk.layout import INDEX, Index, IndexMetadata, file_name, version_folder
from vime.backends.vllm_utils.receipt import ReceiptBuilder, SendReceipt
from vime.errors import PublicationError
from vime.folders import existing_parent

FILE_BYTES = 2 << 30
"""Tensors are collected into files of about this size."""

GIB = 2**30

_COPIED = ("*.json", "*.txt", "*.model", "*.jinja")


@dataclass(frozen=True)
class WrittenVersion:
    """One version on disk."""

    version: int
    base_version: int | None
    """None for a whole checkpoint."""
    receipt: SendReceipt
    """Names and digest of the whole weights, also for a delta."""
    wire_bytes: int
    """Bytes of the files that hold tensors."""
    changed_bytes: int
    """Bytes that differ from the base version; all of them in a whole checkpoint."""

    @property
    def density(self) -> float:
        """Share of the bytes that have changed."""
        return self.changed_bytes / max(1, self.receipt.num_bytes)


@dataclass(frozen=True)
class DeltaFormat:
    """How differences are stored."""

    encoding: Encoding = "xor"
    checksum: str = "xxh3-128"


class VersionWriter:
    """Writes versions into one folder. With a delta format it keeps the bytes of the last version in host memory."""

    def __init__(
        self,
        root: Path,
        *,
        delta: DeltaFormat | None = None,
        configuration: Path | None = None,
        file_bytes: int = FILE_BYTES,
        reserve_bytes: int = 0,
    ) -> None:
        """`configuration` is a checkpoint whose small files (config, tokenizer) go into whole versions.

        No version is begun that would leave less free space than `reserve_bytes`.
        """
        self._root, self._delta, self._configuration = root, delta, configuration
        self._file_bytes, self._reserve_bytes = file_bytes, reserve_bytes
        self._written_bytes: dict[bool, int] = {}
        """Whether it was whole -> bytes of the last such version."""
        self._state: dict[str, Bytes] = {}
        self._state_version: int | None = None

    def write(
        self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]], *, full: bool = False
    ) -> WrittenVersion:
        """Write a version from checkpoint-named tensors on any device; whole when `full`, or when there is no base.

        Raises `PublicationError` when the folder exists, can't be written or has too little space, or when a tensor
        comes twice or has another shape than in the base version; the next version is then written whole.
        """
        base = None if full or self._delta is None else self._state_version
        self._state_version = None  # until this one is whole on disk
        folder = version_folder(self._root, version)
        receipt = ReceiptBuilder()
        try:
            self._check_space(folder, self._written_bytes.get(base is None, 0))
            folder.mkdir(parents=True)
            files = _Files(folder, self._file_bytes)
            changed = 0
            for name, tensor in named_tensors:
                receipt.add(name, tensor)
                host = tensor.detach().to("cpu").contiguous()
                changed += self._add_whole(files, name, host) if base is None else self._add_change(files, name, host)
            built = receipt.build()
            self._check_names(built, base)
            weight_map = files.finish()
            if base is None and self._configuration is not None:
                _copy_configuration(self._configuration, folder)
            replace_file(folder / INDEX, self._index(version, base, built, weight_map))
            sync(folder)
            sync(self._root)
        except OSError as error:
            raise PublicationError(
                f"Version {version} of the weights can't be written to {folder}: {error}.",
                next_step="Give a new folder with enough space as --update-weight-disk-dir.",
            ) from error
        self._state_version = version if self._delta is not None else None
        self._written_bytes[base is None] = files.num_bytes
        return WrittenVersion(version, base, built, files.num_bytes, changed)

    def _check_space(self, folder: Path, num_bytes: int) -> None:
        """Refuse a version that would take as much as the last one of its kind, and then leave too little."""
        found = os.statvfs(existing_parent(folder))
        free, needed = found.f_bavail * found.f_frsize, num_bytes + self._reserve_bytes
        if free < needed:
            raise PublicationError(
                f"{folder} is not written: {free / GIB:.2f} GiB are free, {needed / GIB:.2f} GiB are needed, "
                f"{self._reserve_bytes / GIB:.2f} of them as --rollout-disk-reserve-gib.",
                next_step="Free space there, or give another folder as --update-weight-disk-dir.",
            )

    def remove(self, version: int) -> None:
        """Delete a version that nobody needs any more; one that isn't there is no error."""
        shutil.rmtree(version_folder(self._root, version), ignore_errors=True)

    def _add_whole(self, files: _Files, name: str, host: torch.Tensor) -> int:
        data = flat_bytes(host).numpy()
        if self._delta is not None:
            self._state[name] = data.copy()
        kind = DeltaFormat.checksum if self._delta is None else self._delta.checksum
        files.add(name, host.clone(), checksum(data, kind))
        return int(data.size)

    def _add_change(self, files: _Files, name: str, host: torch.Tensor) -> int:
        assert self._delta is not None
        new, old = flat_bytes(host).numpy(), self._state.get(name)
        if old is None or old.size != new.size:
            found = "no" if old is None else old.size
            raise PublicationError(
                f"Tensor {name} ({dtype_name(host)}{list(host.shape)}) has {new.size} bytes, {found} before.",
                next_step="Publish again; the next version is written whole.",
            )
        difference = np.bitwise_xor(old, new)
        changed = int(np.count_nonzero(difference))
        if changed:
            entry = encode_change(difference, new, self._delta.encoding)
            files.add(name, torch.frombuffer(bytearray(entry), dtype=torch.uint8), checksum(new, self._delta.checksum))
            np.copyto(old, new)
        return changed

    def _check_names(self, receipt: SendReceipt, base: int | None) -> None:
        if base is not None and (missing := sorted(set(self._state) - set(receipt.names))):
            raise PublicationError(
                f"{len(missing)} tensors of version {base} are missing now, first {missing[0]}.",
                next_step="Publish again; the next version is written whole.",
            )

    def _index(self, version: int, base: int | None, receipt: SendReceipt, weight_map: dict[str, str]) -> bytes:
        kind = DeltaFormat.checksum if self._delta is None else self._delta.checksum
        if base is None:
            metadata = IndexMetadata(version=f"{version:06d}", checksum_format=kind, total_size=receipt.num_bytes)
        else:
            assert self._delta is not None
            metadata = IndexMetadata(
                version=f"{version:06d}",
                base_version=f"{base:06d}",
                delta_encoding=self._delta.encoding,
                compression_format=COMPRESSION,
                checksum_format=kind,
            )
        return msgspec.json.format(msgspec.json.encode(Index(metadata, weight_map)), indent=2)


@dataclass
class _Files:
    """The safetensors files of one version, which get their names when their number is known."""

    folder: Path
    file_bytes: int
    num_bytes: int = 0
    _written: list[list[str]] = field(default_factory=list)
    _tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _checksums: dict[str, str] = field(default_factory=dict)
    _size: int = 0

    def add(self, name: str, stored: torch.Tensor, checksum_of_state: str) -> None:
        if self._tensors and self._size + stored.nbytes > self.file_bytes:
            self._flush()
        self._tensors[name], self._checksums[name] = stored, checksum_of_state
        self._size += stored.nbytes

    def finish(self) -> dict[str, str]:
        """Give the files their names; tensor -> file."""
        if self._tensors:
            self._flush()
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._written, start=1):
            name = file_name(number, len(self._written))
            self._temporary(number).rename(self.folder / name)
            weight_map |= dict.fromkeys(names, name)
        return weight_map

    def _flush(self) -> None:
        self._written.append(list(self._tensors))
        metadata = {"format": "pt", **self._checksums}
        self.num_bytes += write_file(self._tensors, self._temporary(len(self._written)), metadata)
        self._tensors, self._checksums, self._size = {}, {}, 0

    def _temporary(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}.tmp"


def _copy_configuration(source: Path, folder: Path) -> None:
    for pattern in _COPIED:
        for path in source.glob(pattern):
            if path.name != INDEX:
                shutil.copyfile(path, folder / path.name)
