"""One session at a time in a run folder."""

import errno
import os
from pathlib import Path

import pytest

from pipeline.run_folder import RunFolder
from pipeline.session_lock import session_lock
from vime.errors import RestoreError, StorageError


def test_one_session_a_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, tmp_path / "rollout_data" / "pool")
    folder.make()
    with session_lock(folder), pytest.raises(RestoreError, match=f"process {os.getpid()}"), session_lock(folder):
        pass
    with session_lock(folder):
        pass


def test_a_folder_that_cannot_be_locked_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    folder = RunFolder(tmp_path, tmp_path / "rollout_data" / "pool")
    folder.make()
    monkeypatch.setattr("fcntl.flock", unsupported)
    with pytest.raises(StorageError, match=r"session\.lock: No locks available"), session_lock(folder):
        pass
