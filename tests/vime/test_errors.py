"""Words of errors for messages."""

from __future__ import annotations

import errno
import os

import pytest

from vime.errors import reason_of


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "a.toml"), "No such file or directory"),
        (OSError("the server closed the line."), "the server closed the line"),
        (ValueError("not a parquet file.."), "not a parquet file"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_the_words_of_an_error_have_no_number_path_or_full_stop(error: Exception, words: str) -> None:
    assert reason_of(error) == words
