"""Errors of the operating system, told in the terms of vime."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from vime.errors import DiskFullError, StorageError


def os_error(error: OSError, path: Path, num_bytes: int) -> StorageError:
    """The `StorageError` for an operating-system error while writing `num_bytes` to `path`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return disk_full(path, num_bytes)
    return StorageError(
        f"{path}: {error.strerror or error} (errno {error.errno}).",
        next_step="Check the mount and its permissions, then restart.",
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
