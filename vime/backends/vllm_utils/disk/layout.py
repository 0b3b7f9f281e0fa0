"""Names and index files of published versions.

`<root>/weight_v000007/` holds `model-00001-of-00003.safetensors`, ... and `model.safetensors.index.json`, which is
written last: a folder without it is unfinished.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from vime.backends.vllm_utils.disk.codec import COMPRESSION
from vime.errors import PublicationError

INDEX = "model.safetensors.index.json"
_FOLDER = re.compile(r"^weight_v(\d{6,})$")


class IndexMetadata(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What the index says of a version; a delta has a base version, a whole checkpoint has none."""

    version: str = ""
    base_version: str | None = None
    delta_encoding: str | None = None
    compression_format: str | None = None
    checksum_format: str | None = None
    total_size: int | None = None


class Index(msgspec.Struct, frozen=True):
    """Content of the index file. `weight_map` maps each stored tensor to its file."""

    metadata: IndexMetadata
    weight_map: dict[str, str]

    @property
    def base(self) -> int | None:
        """Version that a delta must be applied to; None for a whole checkpoint."""
        return None if self.metadata.base_version is None else int(self.metadata.base_version)


def version_folder(root: Path, version: int) -> Path:
    return root / f"weight_v{version:06d}"


def file_name(number: int, count: int) -> str:
    """Name of file `number` (from 1) of `count`."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def highest_version(root: Path) -> int:
    """Highest version that has a folder in `root`, finished or not; 0 when there is none."""
    names = [entry.name for entry in root.iterdir()] if root.is_dir() else []
    return max((int(match[1]) for name in names if (match := _FOLDER.match(name))), default=0)


def read_index(folder: Path) -> Index:
    """Index of a version's folder.

    Raises `PublicationError` when it is missing or can't be read, or when a delta is stored in a way that this code
    doesn't know.
    """
    path = folder / INDEX
    try:
        index = msgspec.json.decode(path.read_bytes(), type=Index)
    except OSError as error:
        raise PublicationError(
            f"{path} can't be read: {error.strerror}.",
            next_step="Check that trainer and engines see the same path, and publish again.",
        ) from error
    except msgspec.DecodeError as error:
        raise PublicationError(f"{path} is damaged: {error}.", next_step="Publish again.") from error
    metadata = index.metadata
    if metadata.base_version is None:
        return index
    if metadata.delta_encoding not in ("xor", "overwrite") or metadata.compression_format != COMPRESSION:
        raise PublicationError(
            f"{path}: delta encoding {metadata.delta_encoding!r} with compression {metadata.compression_format!r}, "
            f"allowed: xor or overwrite with {COMPRESSION}.",
            next_step="Use the same version of vime in trainer and engines.",
        )
    if not metadata.base_version.isdecimal():
        raise PublicationError(f"{path}: base version {metadata.base_version!r}, allowed: a number.")
    return index
