"""A rank that fails ends the replay with its cause, and no rank outlives it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from pipeline.replay import ranks
from vime.errors import RunFailedError, StalledError, TrainerError

PROGRAM = "tests.pipeline.replay.failing_rank"


@pytest.fixture(autouse=True)
def short_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "END_S", 0.2)


def run(scratch: Path, *ends: str, patience_s: float = 60.0) -> None:
    for rank, end in enumerate(ends):
        (scratch / f"rank_{rank}").write_text(end)
    ranks.run_ranks(scratch, len(ends), PROGRAM, patience_s=patience_s)


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


def test_a_rank_that_writes_nothing_for_too_long_is_named_and_ended(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_0.log").write_text("builds its model\n")
    quiet = r"Rank 0 of the replay has written nothing for 0\.5 s.*\n  \| builds its model"
    with pytest.raises(StalledError, match=quiet):
        run(tmp_path, "hangs", "hangs", patience_s=0.5)
    assert [process for process in psutil.Process().children() if PROGRAM in process.cmdline()] == []
