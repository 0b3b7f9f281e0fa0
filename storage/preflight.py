"""Whether a folder's file system does what the queue relies on: tried, not believed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from storage.files import sync_directory, write_atomically
from storage.mounts import MOUNT_TABLE, mount_of
from vime.errors import StorageError
from vime.folders import existing_parent, file_in_the_way

MIN_FREE_BYTES = 256 * 2**20
MIN_FREE_INODES = 10_000
"""A pool makes two files for each writer process, a few for each segment, and one pack for each gibibyte."""


_KERNEL_FILE_SYSTEMS = frozenset(
    {"proc", "sysfs", "cgroup", "cgroup2", "debugfs", "tracefs", "securityfs", "configfs", "devpts", "mqueue", "bpf"}
)
"""They show the kernel's state and hold no files of others, whatever their permissions say."""


@dataclass(frozen=True)
class Probe:
    """One property: whether it holds, and what was seen when it doesn't."""

    name: str
    works: bool
    found: str


def not_writable(folder: Path, table: str | None = None) -> str | None:
    """Why nothing can be written to `folder`, which need not exist; None when permissions and mount allow it.

    Only looks; `probe_folder` tries. `table` stands in for the kernel's mount table.
    """
    try:
        place = existing_parent(folder)
        if (file := file_in_the_way(folder)) is not None:
            return f"{file} is a file"
        mount = mount_of(place.resolve(), MOUNT_TABLE.read_text() if table is None else table)
        if mount is not None and mount.file_system in _KERNEL_FILE_SYSTEMS:
            return f"{mount.point} is the kernel's ({mount.file_system}) and takes no files"
        if os.statvfs(place).f_flag & os.ST_RDONLY:
            return f"{place} is mounted read-only"
        return None if os.access(place, os.W_OK | os.X_OK) else f"no permission to write to {place}"
    except OSError as error:
        return error.strerror or str(error)


@contextlib.contextmanager
def probe_place(folder: Path) -> Iterator[Path]:
    """A new folder inside `folder` for trying things, removed with all that is in it. Raises `OSError`."""
    place = folder / f".vime-probe-{uuid.uuid4().hex}"
    place.mkdir()
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def probe_folder(folder: Path) -> list[Probe]:
    """Try writing, fsync, flock, exclusive creation and rename in a new folder inside `folder`, which must exist.

    Everything made is removed. When nothing can be written, that is the only result.
    """
    attempts: dict[str, Callable[[Path], str | None]] = {
        "writable": _write,
        "fsync": _sync,
        "flock": _lock,
        "exclusive create": _create_exclusively,
        "rename": _rename,
    }
    try:
        with probe_place(folder) as place:
            return [tried(name, partial(attempt, place)) for name, attempt in attempts.items()]
    except OSError as error:
        return [Probe("writable", works=False, found=error.strerror or str(error))]


def tried(name: str, attempt: Callable[[], str | None]) -> Probe:
    """The result of an attempt that returns what is wrong, or raises what the operating system says."""
    try:
        fault = attempt()
    except OSError as error:
        fault = error.strerror or str(error)
    except StorageError as error:
        cause = error.__cause__
        fault = cause.strerror if isinstance(cause, OSError) and cause.strerror else error.message
    return Probe(name, fault is None, fault or "works")


def probe_space(folder: Path, needed_bytes: int = MIN_FREE_BYTES, needed_inodes: int = MIN_FREE_INODES) -> Probe:
    """Free bytes and inodes of the file system under `folder`. One that doesn't count inodes has enough."""

    def look() -> str | None:
        found = os.statvfs(folder)
        free_bytes, free_inodes = found.f_bavail * found.f_frsize, found.f_favail
        short = []
        if free_bytes < needed_bytes:
            short.append(f"{free_bytes / 2**20:.0f} MiB are free, needed: {needed_bytes / 2**20:.0f} MiB")
        if found.f_files and free_inodes < needed_inodes:
            short.append(f"{free_inodes} inodes are free, needed: {needed_inodes}")
        return "; ".join(short) or None

    return tried("space and inodes", look)


def _write(place: Path) -> str | None:
    path = place / "content"
    path.write_bytes(b"vime")
    return None if path.read_bytes() == b"vime" else "what was read is not what was written"


def _sync(place: Path) -> str | None:
    write_atomically(place / "synced", b"vime")
    sync_directory(place)
    return None


def _lock(place: Path) -> str | None:
    """A second open file description must not get the lock, and must get it after the first has let go."""
    path = place / "lock"
    first, second = (os.open(path, os.O_RDWR | os.O_CREAT, 0o644) for _ in range(2))
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return "two holders got the same lock"
        except BlockingIOError:
            pass
        fcntl.flock(first, fcntl.LOCK_UN)
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(first)
        os.close(second)
    return None


def _create_exclusively(place: Path) -> str | None:
    path = place / "once"
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    except FileExistsError:
        return None
    return "an existing file was created again"


def _rename(place: Path) -> str | None:
    source, target = place / "source", place / "target"
    source.write_bytes(b"new")
    target.write_bytes(b"old")
    source.rename(target)
    return None if target.read_bytes() == b"new" and not source.exists() else "the target was not replaced"
