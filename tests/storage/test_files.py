"""Small durable files on disks that don't take them."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.files import append_durably, make_folder, write_atomically, write_once
from vime.errors import StorageError


@pytest.mark.parametrize("write", [write_atomically, write_once, append_durably])
def test_a_full_disk_is_told_and_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, bytes], None]
) -> None:
    if write is not write_once:
        write(tmp_path / "file", b"before")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match=r"file: the file system is full") as caught:
            write(tmp_path / "file", b"x" * 100)
    assert "Free space" in caught.value.next_step
    if write is not append_durably:
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_run_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(StorageError, match=r"/file is a file, not a folder\."):
            make_folder(folder)
