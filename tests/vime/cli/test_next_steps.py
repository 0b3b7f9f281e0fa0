"""What the user can mend is refused with what to do next."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import vime

REPOSITORY = Path(vime.__file__).parents[1]
FOLDERS = ("vime/cli", "vime/data", "vime/settings", "pipeline", "recovery")
ERRORS = {"SettingsError", "DataError", "BadRecordError", "NoRunError", "RestoreError", "CommitError", "StorageError"}


def without_next_step(source: str) -> Iterator[int]:
    """Lines of the errors that are made without a next step, or with an empty one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS:
            given = [word.value for word in node.keywords if word.arg == "next_step"]
            if not given or (isinstance(given[0], ast.Constant) and not given[0].value):
                yield node.lineno


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_refusal_says_what_to_do_next(folder: str) -> None:
    files = sorted((REPOSITORY / folder).rglob("*.py"))
    assert files
    assert [f"{path}:{line}" for path in files for line in without_next_step(path.read_text())] == []


def test_an_error_without_one_is_found() -> None:
    assert list(without_next_step('raise SettingsError("a")\nraise SettingsError("a", next_step="")')) == [1, 2]
    assert list(without_next_step('raise SettingsError("a", next_step="b")\nraise ValueError("a")')) == []
