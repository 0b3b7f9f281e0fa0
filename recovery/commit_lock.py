"""Readers of a commit keep it from being removed: a shared lock on its record."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from recovery.commit import commit_path
from vime.errors import CommitError

WAIT_S = 60.0
"""How long a reader waits for whoever looks whether a commit is read, or removes it."""
_POLL_S = 0.05


def kept_commit(commit: tuple[Path, int] | None) -> AbstractContextManager[None]:
    """`reading_commit` of a folder and rollout; of None, nothing."""
    return nullcontext() if commit is None else reading_commit(commit_path(*commit))


@contextmanager
def reading_commit(record: Path) -> Iterator[None]:
    """Keep the commit of a record while its files are read; any number may.

    Raises:
        CommitError: it is gone, or is being removed for longer than `WAIT_S`.
    """
    gone = CommitError(f"{record}: the commit was removed.", next_step="Choose one that `vime runs` lists.")
    try:
        descriptor = os.open(record, os.O_RDONLY)
    except FileNotFoundError as error:
        raise gone from error
    try:
        _wait_for_readers_lock(descriptor, record)
        if os.fstat(descriptor).st_nlink == 0:
            raise gone
        yield
    finally:
        os.close(descriptor)


@contextmanager
def removing_commit(record: Path) -> Iterator[bool]:
    """Keep readers out while a commit is removed; False when somebody reads it."""
    descriptor = os.open(record, os.O_RDONLY)
    try:
        yield _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def is_read(record: Path) -> bool:
    """Whether somebody reads the commit of a record now."""
    with removing_commit(record) as is_free:
        return not is_free


def _wait_for_readers_lock(descriptor: int, record: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not _lock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB):
        if time.monotonic() > deadline:
            raise CommitError(
                f"{record}: another process has kept it locked for {WAIT_S:g} s, to remove the commit.",
                next_step="Choose another commit that `vime runs` lists, or end that process.",
            )
        time.sleep(_POLL_S)


def _lock(descriptor: int, kind: int) -> bool:
    """Whether nobody holds the opposite lock; True, too, where the file system has no locks."""
    try:
        fcntl.flock(descriptor, kind)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
