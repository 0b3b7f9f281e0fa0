"""What a run says of its transport before it starts."""

import pytest

from pipeline.transports.promise import transport_words
from storage.queue_types import MemorySnapshot
from vime.settings.parse import parse_settings


@pytest.mark.parametrize(
    ("words", "medium"), [([], "Ray's object store"), (["--rollout-data-transport", "nixl"], "NIXL, out of")]
)
def test_a_queue_in_memory_says_what_it_does_not_keep(words: list[str], medium: str) -> None:
    (line,) = transport_words(parse_settings(words), None)
    assert medium in line
    assert "the next one generates again. --rollout-data-transport straw keeps it." in line


def test_a_resume_says_how_many_groups_it_generates_again() -> None:
    _, line = transport_words(parse_settings([]), MemorySnapshot([(3, 5), (8, 8)], {}))
    assert line.startswith("4 groups were not trained at that commit")


def test_a_queue_on_disk_has_nothing_to_say() -> None:
    assert transport_words(parse_settings(["--rollout-data-transport", "straw"]), None) == []
