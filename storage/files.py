"""Small files that must survive a crash: written whole, synced, and never half-read.

Errors of the operating system come out as `StorageError` (see `storage.os_errors`).
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from storage.os_errors import no_folder, os_error
from vime.errors import StorageError


def sync_directory(directory: Path) -> None:
    """fsync a directory, so that the names in it are durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by `content`; after a crash it holds the old content or the new, whole."""
    with _told_as_storage_error(path, len(content)):
        temporary = _write_temporary(path, content)
        temporary.replace(path)
        sync_directory(path.parent)


def write_once(path: Path, content: bytes) -> None:
    """Create `path`, which must not exist, with `content`, whole or not at all.

    Raises:
        FileExistsError: it exists.
    """
    with _told_as_storage_error(path, len(content)):
        temporary = _write_temporary(path, content)
        try:
            os.link(temporary, path)
        finally:
            temporary.unlink()
        sync_directory(path.parent)


def remove_durably(path: Path) -> None:
    """Remove a file, where there is one; it does not come back after a crash."""
    with _told_as_storage_error(path):
        if path.exists():
            path.unlink()
            sync_directory(path.parent)


def append_durably(path: Path, line: bytes) -> None:
    """Append one line (given without its newline) and fsync. One writer at a time.

    A torn last line, left by a crash, was never acknowledged and is cut off first.
    """
    with _told_as_storage_error(path, len(line)):
        existed = path.exists()
        with path.open("ab+") as file:
            if not _ends_whole(file):
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if not existed:
            sync_directory(path.parent)


def make_folder(path: Path) -> None:
    """Create a folder and those above it, where they don't exist. Raises `StorageError`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise no_folder(path) from error
    except OSError as error:
        raise os_error(error, path, 0) from error


def _ends_whole(file: BinaryIO) -> bool:
    if file.seek(0, os.SEEK_END) == 0:
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def sync_tree(directory: Path) -> None:
    """fsync every file and folder under `directory`."""
    for folder, _, names in os.walk(directory):
        for name in names:
            descriptor = os.open(Path(folder) / name, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(Path(folder))


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file.

    Raises:
        StorageError: it can't be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}.", next_step="Check the mount and the file's rights.") from error


def _write_temporary(path: Path, content: bytes) -> Path:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


@contextmanager
def _told_as_storage_error(path: Path, num_bytes: int = 0) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise os_error(error, path, num_bytes) from error
