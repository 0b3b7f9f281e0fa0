"""Errors of the operating system, told in the terms of vime."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from vime.errors import DiskFullError, StorageError
from vime.folders import file_in_the_way


def os_error(error: OSError, path: Path, num_bytes: int) -> StorageError:
    """The `StorageError` for an operating-system error while writing `num_bytes` to `path`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return disk_full(path, num_bytes)
    if error.errno == errno.ENOTDIR:
        return no_folder(path)
    return StorageError(
        f"{path}: {error.strerror or error} (errno {error.errno}).",
        next_step="Check the mount and its permissions, then restart.",
    )


def no_folder(path: Path) -> StorageError:
    """The `StorageError` for a path that can't be a folder, or be in one, because a file is in its place."""
    return StorageError(
        f"{file_in_the_way(path) or path} is a file, not a folder.", next_step="Give a folder, or move the file away."
    )


def disk_full(path: Path, num_bytes: int) -> DiskFullError:
    """The `DiskFullError` for a full file system: names what was needed (0: unknown) and what is free."""
    where = path if path.exists() else path.parent
    try:
        free = f"{shutil.disk_usage(where).free} bytes are free"
    except OSError:
        free = "free space is unknown"
    needed = f"at least {num_bytes} bytes are needed, " if num_bytes else ""
    return DiskFullError(
        f"{path}: the file system is full or over quota; {needed}{free}.",
        next_step="Free space or raise the quota, then reopen the queue; nothing acknowledged was lost.",
    )
