"""Probes of a folder, on a good file system and on broken ones; and the mount table."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from storage.mounts import Mount, mount_of, mounted_at
from storage.preflight import not_writable, probe_folder, probe_space

NAMES = ["writable", "fsync", "flock", "exclusive create", "rename"]


def test_ordinary_folder_passes_and_is_left_as_it_was(tmp_path: Path) -> None:
    probes = probe_folder(tmp_path)
    assert [(probe.name, probe.works) for probe in probes] == [(name, True) for name in NAMES]
    assert list(tmp_path.iterdir()) == []


def broken(folder: Path) -> list[tuple[str, str]]:
    return [(probe.name, probe.found) for probe in probe_folder(folder) if not probe.works]


def test_folder_without_room_for_a_probe_is_not_writable(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert broken(file) == [("writable", "Not a directory")]


def test_lock_that_two_can_hold_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    assert broken(tmp_path) == [("flock", "two holders got the same lock")]


def test_refused_fsync_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    assert broken(tmp_path) == [("fsync", "Invalid argument")]


def test_exclusive_creation_that_is_not_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opens = os.open

    def careless(path: Any, flags: int, mode: int = 0o777) -> int:
        return opens(path, flags & ~os.O_EXCL, mode)

    monkeypatch.setattr(os, "open", careless)
    assert broken(tmp_path) == [("exclusive create", "an existing file was created again")]


def test_rename_that_fails_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: Path, _target: Path) -> Path:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(Path, "rename", refuse)
    assert broken(tmp_path) == [("rename", "Invalid cross-device link")]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOLCK])
def test_file_system_without_a_lock_service_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert broken(tmp_path) == [("flock", os.strerror(number))]


def test_space_and_inodes_are_compared_with_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe_space(tmp_path, needed_bytes=1, needed_inodes=0).works
    size = os.statvfs_result((4096, 4096, 1000, 500, 256, 5000, 7, 7, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: size)
    assert probe_space(tmp_path, 2**21, 8).found == "1 MiB are free, needed: 2 MiB; 7 inodes are free, needed: 8"
    assert probe_space(tmp_path, 2**20, 7).works


def test_file_system_that_does_not_count_inodes_has_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = os.statvfs_result((4096, 4096, 1000, 500, 256, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: size)
    assert probe_space(tmp_path, 2**20, 8).works


TABLE = """\
1 0 8:1 / / rw - ext4 /dev/sda1 rw
2 1 0:5 / /mnt/my\\040data rw shared:1 - fuse.juicefs JuiceFS:vime rw
3 1 0:6 / /mnt/over rw - ext4 /dev/sdb rw
4 1 0:7 / /mnt/over rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/home/x", Mount(Path("/"), "ext4")),
        ("/mnt/my data/run", Mount(Path("/mnt/my data"), "fuse.juicefs")),
        ("/mnt/my database", Mount(Path("/"), "ext4")),
        ("/mnt/over", Mount(Path("/mnt/over"), "tmpfs")),
    ],
)
def test_the_deepest_and_topmost_mount_holds_a_path(path: str, mount: Mount) -> None:
    assert mount_of(Path(path), TABLE) == mount


def test_only_the_mount_point_itself_has_something_mounted_at_it() -> None:
    assert mounted_at(Path("/mnt/my data"), TABLE) == "fuse.juicefs"
    assert mounted_at(Path("/mnt/my data/run"), TABLE) is None


def test_folder_without_permission_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not_writable(tmp_path / "new") is None
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert not_writable(tmp_path / "new") == f"no permission to write to {tmp_path}"


def test_what_cannot_even_be_looked_at_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(_: Path) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(os, "statvfs", dead)
    assert not_writable(tmp_path) == "Transport endpoint is not connected"
    assert list(tmp_path.iterdir()) == []
