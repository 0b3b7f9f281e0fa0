"""A rank that fails ends the replay with its cause, and no rank outlives it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from pipeline.replay import ranks
from vime.errors import RunFailedError, TrainerError

PROGRAM = "tests.pipeline.replay.failing_rank"


@pytest.fixture(autouse=True)
def short_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "END_S", 0.2)


def run(scratch: Path, *ends: str) -> None:
    for rank, end in enumerate(ends):
        (scratch / f"rank_{rank}").write_text(end)
    ranks.run_ranks(scratch, len(ends), PROGRAM)


def test_ranks_that_end_well_end_the_replay_well(tmp_path: Path) -> None:
    run(tmp_path, "well", "well")


def test_what_a_rank_tells_is_raised_as_it_was_and_the_others_end(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="loss is not finite") as raised:
        run(tmp_path, "hangs", "tells")
    assert raised.value.next_step == "Look at these samples."
    assert [process for process in psutil.Process().children() if PROGRAM in process.cmdline()] == []


def test_a_rank_that_dies_without_a_word_is_named_with_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match=r"Rank 1 of the replay ended with status -9\.\n  \| the last words"):
        run(tmp_path, "hangs", "dies")
