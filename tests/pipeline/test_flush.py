"""The flush rule against the documented table."""

import pytest

from pipeline.flush import publication_flushes

FLUSHED = {1: range(1, 11), 0: [1], -3: [1], 2: [1, 3, 5, 7, 9], 3: [1, 4, 7, 10], 8: [1, 9]}


@pytest.mark.parametrize("interval", FLUSHED)
def test_fresh_run_flushes_the_versions_of_the_table(interval: int) -> None:
    flushed = [version for version in range(1, 11) if publication_flushes(version, 0, interval)]
    assert flushed == list(FLUSHED[interval])


@pytest.mark.parametrize(("interval", "later"), [(2, [7, 9]), (8, [9]), (0, []), (1, [7, 8, 9, 10])])
def test_resume_at_version_5_flushes_first_and_then_keeps_the_phase_of_version_1(
    interval: int, later: list[int]
) -> None:
    flushed = [version for version in range(6, 11) if publication_flushes(version, 5, interval)]
    assert flushed == [6, *later]


@pytest.mark.parametrize("version", [3, 5])
def test_version_that_goes_back_is_refused_with_both_numbers(version: int) -> None:
    with pytest.raises(ValueError, match=rf"version {version} is not above the version 5"):
        publication_flushes(version, 5, 1)
