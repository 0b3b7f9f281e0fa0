"""One session a run folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.run_folder import RunFolder
from storage.os_errors import os_error
from vime.errors import SessionRunningError


def session_is_running(folder: RunFolder) -> bool:
    """Whether a session holds the lock now; False where it can't be looked at."""
    try:
        descriptor = os.open(folder.session_lock, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def session_lock(folder: RunFolder) -> Iterator[None]:
    """One session a run folder.

    Raises:
        SessionRunningError: another one holds it.
        StorageError: it can't be locked.
    """
    path = folder.session_lock
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.truncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            raise os_error(error, path, 0) from error
        raise _running(folder) from error
    try:
        yield
    finally:
        os.close(descriptor)


def refuse_running(folder: RunFolder) -> None:
    """Raise `SessionRunningError` while a session holds the run folder; nothing is written and nothing stays locked."""
    if session_is_running(folder):
        raise _running(folder)


def _running(folder: RunFolder) -> SessionRunningError:
    return SessionRunningError(
        f"{folder.root}: another session is running there (process "
        f"{folder.session_lock.read_text().strip() or 'unknown'}).",
        next_step="Wait for it, stop it, or use another --save.",
    )
