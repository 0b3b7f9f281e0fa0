"""Records that help people never end a run: what they lack is counted and told."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.optional_records import OptionalRecords, Unwritten, unwritten_words
from vime.errors import DiskFullError


class Disk:
    """Full until a test says otherwise; counts what is tried."""

    def __init__(self) -> None:
        self.is_full, self.tried = True, 0

    def write(self) -> None:
        self.tried += 1
        if self.is_full:
            raise DiskFullError(f"full at {self.tried}")


def test_a_record_that_can_not_be_written_is_left_alone_and_its_batches_are_counted() -> None:
    disk, records = Disk(), OptionalRecords()
    for _ in range(3):
        records.write("token log", disk.write)
    disk.is_full = False
    records.write("token log", disk.write)
    assert disk.tried == 1, "it takes no more space from what must be written"
    assert records.unwritten == [Unwritten("token log", 4, "full at 1")]


def test_a_small_record_is_tried_again_with_each_batch() -> None:
    disk, records = Disk(), OptionalRecords()
    for _ in range(2):
        records.write("metrics.jsonl", disk.write, tries_again=True)
    disk.is_full = False
    records.write("metrics.jsonl", disk.write, tries_again=True)
    assert disk.tried == 3
    assert records.unwritten == [Unwritten("metrics.jsonl", 2, "full at 2")]


def test_records_do_not_know_of_each_other_and_a_tool_may_raise_an_error_of_the_system(tmp_path: Path) -> None:
    records = OptionalRecords()
    full, working = Disk(), Disk()
    working.is_full = False
    records.write("profile", (tmp_path / "no" / "folder").mkdir)
    records.write("token log", full.write)
    records.write("memory record", working.write)
    assert [(each.record, each.num_batches) for each in records.unwritten] == [("profile", 1), ("token log", 1)]
    assert "No such file" in records.unwritten[0].why


def test_an_error_of_the_work_itself_comes_out() -> None:
    def broken() -> None:
        raise ValueError("a fault of the program")

    with pytest.raises(ValueError, match="a fault of the program"):
        OptionalRecords().write("token log", broken)


def test_ranks_are_told_of_together_by_record_with_the_reason_of_the_one_that_lacks_most() -> None:
    found = [Unwritten("token log", 1, "quota"), Unwritten("profile", 1, "full"), Unwritten("token log", 3, "lost")]
    assert unwritten_words(found) == [
        "The token log lacks 3 batches of this session on 2 ranks: lost",
        "The profile lacks 1 batch of this session: full",
    ]
    assert unwritten_words([]) == []
