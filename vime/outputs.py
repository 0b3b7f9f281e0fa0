"""Files and folders that a flag names for what a command writes, and what is said where they can't be written."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vime.errors import DiskFullError, SettingsError, StorageError, VimeError, reason_of

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NEXT_STEPS = {
    errno.ENOENT: "Name a place in a folder that exists.",
    errno.EEXIST: "Name a new one.",
    errno.EISDIR: "Name a file, not a folder.",
    errno.ENOTDIR: "Name a place below folders only: one of those above it is a file.",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "Name a place where you may write, or change its permissions."),
    errno.EROFS: "Name a place on a file system that can be written.",
    **dict.fromkeys(_FULL, "Free space, or name a place on another file system."),
}


def output_error(flag: str, path: Path, error: OSError) -> VimeError:
    """What to raise where `path`, which `flag` named, can't be made or written.

    A full file system is a `DiskFullError`, all else a `SettingsError`.
    """
    kind = DiskFullError if error.errno in _FULL else SettingsError
    next_step = _NEXT_STEPS.get(error.errno or 0, "Name another place.")
    return kind(f"{flag} {path} can't be written: {reason_of(error)}.", next_step=next_step)


def write_output(flag: str, path: Path, content: str) -> None:
    """Write the file that `flag` named, in place of one that is there. Raises as `output_error`."""
    try:
        path.write_text(content)
    except OSError as error:
        raise output_error(flag, path, error) from error


def empty_output_folder(flag: str, folder: Path) -> Path:
    """The folder that `flag` named, absolute and made where there was none.

    Raises `SettingsError` for one that holds something, and as `output_error`.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise SettingsError(f"{flag} {folder} is not an empty folder.", next_step="Name another one.")
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise output_error(flag, folder, error) from error
    return folder.resolve()


def temporary_folder(prefix: str) -> Path:
    """A new folder for what is written meanwhile, which its caller deletes.

    Raises `StorageError` where none can be made.
    """
    try:
        return Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        raise StorageError(
            f"No folder for temporary files can be made: {reason_of(error)}.",
            next_step="Set TMPDIR to a folder where you may write.",
        ) from error


@contextmanager
def passing_folder(prefix: str) -> Iterator[Path]:
    """As `temporary_folder`, gone at the end with what is in it."""
    folder = temporary_folder(prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
