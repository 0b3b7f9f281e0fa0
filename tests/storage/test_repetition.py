"""Which responses count as loops."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.repetition import is_repetitive

PROSE = (Path(__file__).resolve().parents[2] / "docs" / "architecture.md").read_text()
PHRASE = "So the answer must be checked once more, since the last step may have gone wrong somewhere. "


@pytest.mark.parametrize("text", ["a" * 1000, PHRASE * 12, PROSE[:20_000] + PHRASE * 120])
def test_a_response_that_ends_in_a_loop_is_repetitive(text: str) -> None:
    assert is_repetitive(text)


@pytest.mark.parametrize("text", ["", "a" * 999, PROSE, PROSE[:3000] * 2, PHRASE * 120 + PROSE[:10_000]], ids=range(5))
def test_prose_short_texts_and_a_loop_that_ended_are_not(text: str) -> None:
    assert not is_repetitive(text)


def test_half_of_a_character_is_no_error() -> None:
    assert is_repetitive("\ud800" * 1000)
