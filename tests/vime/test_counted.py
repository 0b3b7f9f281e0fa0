"""Numbers and their nouns in messages."""

import pytest

from vime.counted import agreeing, counted


@pytest.mark.parametrize(
    ("number", "noun", "words"),
    [
        (0, "group", "0 groups"),
        (1, "group", "1 group"),
        (2, "group", "2 groups"),
        (1, "worker process", "1 worker process"),
        (9, "worker process", "9 worker processes"),
        (3, "rollout batch", "3 rollout batches"),
    ],
)
def test_noun_agrees_with_its_number(number: int, noun: str, words: str) -> None:
    assert counted(number, noun) == words


def test_verb_agrees_with_its_number() -> None:
    assert (agreeing(1, "has"), agreeing(2, "has"), agreeing(1, "was"), agreeing(0, "was")) == (
        "has", "have", "was", "were"
    )  # fmt: skip
