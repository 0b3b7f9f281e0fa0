"""One coordinator at a time: a file lock, and an epoch on disk that fences whoever lost the lock without noticing.

An epoch is an immutable file `epochs/<number>.json`, made with O_EXCL, so two claimants never get the same number
even where flock is broken. A new holder removes the older files in ascending order; a coordinator whose own file is
gone, or who sees the next number, has been replaced.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from pathlib import Path
from types import TracebackType

import msgspec

from storage.files import sync_directory
from storage.os_errors import os_error
from vime.errors import CoordinatorBusyError, StorageError


class Holder(msgspec.Struct, frozen=True):
    """Who claimed an epoch."""

    owner: str
    pid: int
    host: str
    since: float
    """Unix seconds."""


class CoordinatorLock:
    """The right to write the queue of one pool. Made by `acquire`, ended by `release` or by the process's death."""

    def __init__(self, folder: Path, descriptor: int, epoch: int) -> None:
        self.folder = folder
        self.epoch = epoch
        self._descriptor: int | None = descriptor

    @classmethod
    def acquire(cls, folder: Path, *, owner: str) -> CoordinatorLock:
        """Take the lock and the next epoch.

        Raises `CoordinatorBusyError` naming the holder, or `StorageError` where the file system can't lock.
        """
        epochs = folder / "epochs"
        path = folder / "coordinator.lock"
        try:
            epochs.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise os_error(error, path, 0) from error
        try:
            _lock(descriptor, path, epochs)
            epoch = _claim(epochs, Holder(owner, os.getpid(), socket.gethostname(), time.time()))
        except OSError as error:
            os.close(descriptor)
            raise os_error(error, epochs, 0) from error
        except StorageError:
            os.close(descriptor)
            raise
        return cls(folder, descriptor, epoch)

    def still_mine(self) -> bool:
        """Whether no later coordinator has claimed an epoch; reads the disk. Raises `StorageError` when it can't."""
        epochs = self.folder / "epochs"
        try:
            return (
                self._descriptor is not None
                and _epoch_path(epochs, self.epoch).exists()
                and not _epoch_path(epochs, self.epoch + 1).exists()
            )
        except OSError as error:
            raise os_error(error, epochs, 0) from error

    def check(self) -> None:
        """Raise `CoordinatorBusyError` unless `still_mine`. To be called before every change."""
        if self._descriptor is None:
            raise StorageError(
                f"The coordinator lock of {self.folder} was released.", next_step="Open the queue again."
            )
        if not self.still_mine():
            raise _busy(self.folder / "epochs", f"epoch {self.epoch} of the queue in {self.folder.parent} has ended")

    def release(self) -> None:
        """Let the next coordinator in. The epoch stays, so that numbers only grow."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> CoordinatorLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def refuse_held(folder: Path) -> None:
    """Raise `CoordinatorBusyError` while a coordinator holds the lock; nothing is written and nothing stays locked."""
    path = folder / "coordinator.lock"
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    except OSError as error:
        raise os_error(error, path, 0) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _busy(folder / "epochs", f"the queue in {folder.parent} has a coordinator") from error
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path, epochs: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _busy(epochs, f"the queue in {path.parent.parent} has a coordinator") from error
    except OSError as error:
        if error.errno not in (errno.ESTALE, errno.ENOLCK):
            raise
        raise StorageError(
            f"{path}: the file system can't lock: {error.strerror} (errno {error.errno}).",
            next_step="Remount the file system with working flock (NFS: a running lock service), then restart.",
        ) from error


def _claim(epochs: Path, holder: Holder) -> int:
    """Make the next epoch file durable and remove the older ones."""
    epoch = max(_existing(epochs), default=0) + 1
    while True:
        try:
            descriptor = os.open(_epoch_path(epochs, epoch), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            epoch += 1
            continue
        break
    try:
        os.write(descriptor, msgspec.json.encode(holder))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_directory(epochs)
    for older in sorted(number for number in _existing(epochs) if number < epoch):
        _epoch_path(epochs, older).unlink(missing_ok=True)
    return epoch


def _existing(epochs: Path) -> list[int]:
    return [int(path.stem) for path in epochs.glob("*.json") if path.stem.isdigit()]


def _epoch_path(epochs: Path, epoch: int) -> Path:
    return epochs / f"{epoch:08d}.json"


def _busy(epochs: Path, what: str) -> CoordinatorBusyError:
    epoch = max(_existing(epochs), default=0)
    try:
        holder = msgspec.json.decode(_epoch_path(epochs, epoch).read_bytes(), type=Holder)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since))
        who = f"{holder.owner!r}, process {holder.pid} on host {holder.host} since {since}"
    except (OSError, msgspec.MsgspecError):
        who = "an unknown process"
    return CoordinatorBusyError(
        f"{what}: the holder is {who} (epoch {epoch}).",
        next_step="Stop that process first, or attach to its run; the lock frees itself when the process ends "
        "(on JuiceFS up to a minute after its client died).",
    )
