"""Which file system a folder lies on, by the kernel's mount table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MOUNT_TABLE = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class Mount:
    """One line of the table."""

    point: Path
    file_system: str
    """For example ext4, tmpfs, fuse.juicefs."""


def mount_of(path: Path, table: str) -> Mount | None:
    """The mount that holds `path` (absolute), given the text of `/proc/self/mountinfo`. Never touches the mount."""
    best: Mount | None = None
    for line in table.splitlines():
        left, separator, right = line.partition(" - ")
        if not separator:
            continue
        point = Path(_unescape(left.split()[4]))
        deeper = best is None or len(point.parts) >= len(best.point.parts)  # of equal ones, the last is on top
        if deeper and path.is_relative_to(point):
            best = Mount(point, right.split()[0])
    return best


def mounted_at(point: Path, table: str) -> str | None:
    """File system type of what is mounted exactly at `point` (absolute), None when nothing is."""
    mount = mount_of(point, table)
    return mount.file_system if mount is not None and mount.point == point else None


def _unescape(path: str) -> str:
    """The kernel writes blanks in paths as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), path)
