"""A folder that is there whole or not at all."""

from __future__ import annotations

import errno
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storage.files import sync_directory, sync_tree
from vime.errors import DiskFullError, SettingsError
from vime.outputs import output_error

GIB = 2**30
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def new_folder(target: Path, needed_bytes: int, *, replaces: str | None = None) -> Iterator[Path]:
    """Yield an empty folder beside `target`, which becomes `target` at the end; after an error nothing is left.

    A `target` that holds a file named `replaces` is replaced.

    Raises:
        SettingsError: another `target` exists, or it can't be made.
        DiskFullError: less than `needed_bytes` are free, or the disk became full.
    """
    _refuse_other(target, replaces)
    partial = target.parent / f".{target.name}.partial-{uuid.uuid4().hex[:8]}"
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise output_error("The folder", target, error) from error
    try:
        _check_space(target, needed_bytes)
        yield partial
        sync_tree(partial)
        _refuse_other(target, replaces)
        _move(partial, target)
        sync_directory(target.parent)
    except OSError as error:
        if error.errno in _FULL:
            raise _full(target, needed_bytes) from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _refuse_other(target: Path, replaces: str | None) -> None:
    if replaces is None or not (target / replaces).is_file():
        refuse_existing(target)


def _move(partial: Path, target: Path) -> None:
    if not target.exists():
        partial.rename(target)
        return
    before = partial.with_suffix(".before")
    target.rename(before)
    partial.rename(target)
    shutil.rmtree(before)


def refuse_existing(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise SettingsError(
            f"{target} exists, and nothing is overwritten.", next_step="Choose another name, or remove it first."
        )


def _check_space(target: Path, needed_bytes: int) -> None:
    if shutil.disk_usage(target.parent).free < needed_bytes:
        raise _full(target, needed_bytes)


def _full(target: Path, needed_bytes: int) -> DiskFullError:
    free = shutil.disk_usage(target.parent).free
    return DiskFullError(
        f"{target.parent}: {free / GIB:.2f} GiB are free, {needed_bytes / GIB:.2f} GiB are needed for {target.name}.",
        next_step="Free the space, or choose a target on another file system.",
    )
