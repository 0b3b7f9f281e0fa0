"""A folder that is there whole or not at all."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from vime.backends.megatron_utils.new_folder import new_folder
from vime.errors import DiskFullError, SettingsError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_and_fail(target: Path, error: Exception) -> None:
    with new_folder(target, 100) as folder:
        (folder / "weights").write_text("w")
        raise error


def test_the_folder_appears_at_the_end_only(tmp_path: Path) -> None:
    with new_folder(tmp_path / "out", 0) as folder:
        (folder / "weights").write_text("w")
        assert not (tmp_path / "out").exists()
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "weights").read_text() == "w"


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        write_and_fail(tmp_path / "out", ZeroDivisionError())
    assert names(tmp_path) == []


def test_what_exists_is_not_overwritten_even_when_it_came_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    with (
        pytest.raises(SettingsError, match="before exists, and nothing is overwritten"),
        new_folder(tmp_path / "before", 0),
    ):
        pass
    with pytest.raises(SettingsError, match="out exists"), new_folder(tmp_path / "out", 0):
        (tmp_path / "out").mkdir()
    assert names(tmp_path) == ["before", "out"]


def test_a_folder_that_cannot_be_made_is_told_by_the_name_that_was_given(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    target = tmp_path / "file" / "out"
    with (
        pytest.raises(SettingsError, match=f"The folder {target} can't be written: Not a directory"),
        new_folder(target, 0),
    ):
        pass


def test_only_a_folder_with_the_mark_is_replaced(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with new_folder(tmp_path / "out", 0, replaces="mark") as folder:
            (folder / "mark").touch()
            (folder / text).touch()
    assert names(tmp_path / "out") == ["mark", "second"]
    assert names(tmp_path) == ["out"]
    (tmp_path / "out" / "mark").unlink()
    with pytest.raises(SettingsError, match="nothing is overwritten"), new_folder(tmp_path / "out", 0, replaces="mark"):
        pass


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with (
        pytest.raises(DiskFullError, match=r"GiB are free, 1048576\.00 GiB are needed for out"),
        new_folder(tmp_path / "out", 2**50),
    ):
        raise AssertionError("nothing must be written")
    assert names(tmp_path) == []


def test_a_disk_that_becomes_full_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DiskFullError, match="are needed for out"):
        write_and_fail(tmp_path / "out", OSError(errno.ENOSPC, "No space left on device"))
    assert names(tmp_path) == []


def test_a_place_where_no_folder_can_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="Not a directory"), new_folder(tmp_path / "file" / "out", 0):
        pass
