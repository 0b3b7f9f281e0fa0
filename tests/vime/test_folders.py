"""What keeps a path from being a folder."""

from pathlib import Path

import pytest

from vime.folders import existing_parent, file_in_the_way


@pytest.mark.parametrize("below", [".", "run", "run/deeper"])
def test_a_file_at_the_path_or_above_it_is_in_the_way(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.touch()
    assert file_in_the_way(file / below) == file
    assert existing_parent(file / below) == file


def test_nothing_is_in_the_way_of_a_folder_or_of_one_that_can_be_made(tmp_path: Path) -> None:
    assert file_in_the_way(tmp_path) is None
    assert file_in_the_way(tmp_path / "new" / "deeper") is None
    assert existing_parent(tmp_path / "new" / "deeper") == tmp_path
