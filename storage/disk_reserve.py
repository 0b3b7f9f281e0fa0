"""Free space that is kept back: below it production pauses, before the file system is full."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from storage.os_errors import os_error

GIB = 2**30


@dataclass(frozen=True)
class Shortfall:
    """A file system with less free space than its reserve. Bytes."""

    folder: Path
    needed: int
    free: int

    def __str__(self) -> str:
        return (
            f"{self.folder}: {self.free / GIB:.2f} GiB are free, {self.needed / GIB:.2f} GiB are needed "
            "(--rollout-disk-reserve-gib)"
        )


class DiskReserve:
    """Watches the file system of one folder."""

    def __init__(
        self, folder: Path, reserve_bytes: int, statvfs: Callable[[Path], os.statvfs_result] | None = None
    ) -> None:
        """`statvfs` is asked in place of the operating system."""
        self._folder, self._reserve_bytes, self._statvfs = folder, reserve_bytes, statvfs or os.statvfs

    def shortfall(self) -> Shortfall | None:
        """What is missing now, None when there is enough. Raises `StorageError` when the folder can't be asked."""
        if self._reserve_bytes == 0:
            return None
        try:
            space = self._statvfs(self._folder)
        except OSError as error:
            raise os_error(error, self._folder, 0) from error
        free = space.f_bavail * space.f_frsize
        return Shortfall(self._folder, self._reserve_bytes, free) if free < self._reserve_bytes else None
