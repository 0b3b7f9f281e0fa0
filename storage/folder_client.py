"""File operations of one client in one folder, small enough to be asked of another host, and to be broken in tests."""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from storage.files import sync_directory

WAIT_S = 3.0
"""How long a client may take to see what another has made durable; straw waits for 3.85 s in a read."""
_POLL_S = 0.02


class FileClient(Protocol):
    """One host's (or one mount's) view of a shared folder. Names are file names in it.

    Every method raises `OSError` as the file system does.
    """

    def append(self, name: str, data: bytes, *, sync: bool) -> None:
        """Append to a file, which stays open, and fsync it when told to."""

    def close(self, name: str) -> None:
        """Close what `append` holds open."""

    def read(self, name: str, expected: bytes) -> bytes | None:
        """Open and read until the content is `expected`, for `WAIT_S` at most; the last content.

        None when the file does not exist then. Returns at once when there is a zero byte, which nobody writes.
        """

    def read_once(self, name: str) -> bytes | None:
        """Open and read. None when the file does not exist."""

    def replace(self, name: str, data: bytes) -> None:
        """Put another file, whole and synced, in its place."""

    def create_exclusively(self, name: str) -> bool:
        """Whether the file could be made; False when it is there."""

    def try_lock(self, name: str) -> bool:
        """Whether this client got the file's lock (flock), trying for up to `WAIT_S`; it holds it until `unlock`."""

    def is_locked(self, name: str) -> bool:
        """Whether somebody else holds the file's lock now."""

    def unlock(self, name: str) -> None:
        """Let go of the lock."""

    def clock(self) -> float:
        """Unix seconds of this host."""


@dataclass
class FolderClient:
    """This process's view of `folder`, which must exist."""

    folder: Path
    _open: dict[str, int] = field(default_factory=dict)
    _locks: dict[str, int] = field(default_factory=dict)

    def append(self, name: str, data: bytes, *, sync: bool) -> None:
        if name not in self._open:
            self._open[name] = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            sync_directory(self.folder)
        left = memoryview(data)
        while left:
            left = left[os.write(self._open[name], left) :]
        if sync:
            os.fsync(self._open[name])

    def close(self, name: str) -> None:
        os.close(self._open.pop(name))

    def read(self, name: str, expected: bytes) -> bytes | None:
        deadline = time.monotonic() + WAIT_S
        while True:
            content = self.read_once(name)
            if content == expected or (content is not None and 0 in content) or time.monotonic() > deadline:
                return content
            time.sleep(_POLL_S)

    def read_once(self, name: str) -> bytes | None:
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def replace(self, name: str, data: bytes) -> None:
        self.append(f"{name}.new", data, sync=True)
        self.close(f"{name}.new")
        (self.folder / f"{name}.new").replace(self.folder / name)
        sync_directory(self.folder)

    def create_exclusively(self, name: str) -> bool:
        try:
            os.close(os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            return False
        return True

    def try_lock(self, name: str) -> bool:
        deadline = time.monotonic() + WAIT_S
        while self.is_locked(name, keep=True):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def is_locked(self, name: str, *, keep: bool = False) -> bool:
        descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return True
        except OSError:
            os.close(descriptor)
            raise
        if keep:
            self._locks[name] = descriptor
        else:
            os.close(descriptor)
        return False

    def unlock(self, name: str) -> None:
        os.close(self._locks.pop(name))

    def clock(self) -> float:
        return time.time()

    def release(self) -> None:
        """Close everything that is still open."""
        for held in (self._open, self._locks):
            while held:
                os.close(held.popitem()[1])
