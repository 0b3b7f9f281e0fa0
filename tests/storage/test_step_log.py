from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from storage.positions import PositionRanges
from storage.queue_types import PlanRecord
from storage.refs import PoolRef
from storage.step_log import StepLog, TrainedRecord, log_files, read_step_log
from vime.errors import CorruptDataError, StorageError

RECORDS = [TrainedRecord("main", step, step + 1, [2 * step, 2 * step + 1]) for step in range(3)]


def write_log(folder: Path, records: list[TrainedRecord]) -> None:
    log = StepLog(folder)
    for record in records:
        log.append(record)
    log.close()


def plan(batch_id: str, positions: list[int]) -> PlanRecord:
    return PlanRecord(batch_id, positions, PoolRef("run", "pack", "s", 1, "c", 2, "sha256", 0, 0, "digest", 1, 1))


@pytest.fixture
def rotating(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rotation begins a new file."""
    monkeypatch.setattr("storage.step_log.MAX_LOG_BYTES", 0)


def test_a_log_cut_at_any_byte_holds_the_records_before_it_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "trained.jsonl"
    write_log(tmp_path, RECORDS)
    data = path.read_bytes()
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        whole = data[:length].count(b"\n")
        assert read_step_log(tmp_path) == RECORDS[:whole]
        write_log(tmp_path, RECORDS[whole:])
        assert path.read_bytes() == data


def test_a_zero_filled_tail_is_a_torn_tail(tmp_path: Path) -> None:
    write_log(tmp_path, RECORDS[:2])
    with (tmp_path / "trained.jsonl").open("ab") as stream:
        stream.write(bytes(4096))
    write_log(tmp_path, RECORDS[2:])
    assert read_step_log(tmp_path) == RECORDS


def test_a_record_that_a_failing_disk_cut_off_is_no_damage_before_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = StepLog(tmp_path)
    log.append(RECORDS[0])
    write = os.write

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr("storage.step_log.os.write", lambda file, data: write(file, data[:20]))
        broken.setattr("storage.step_log.os.ftruncate", fail)
        with pytest.raises(StorageError):
            log.append(RECORDS[1])
    log.append(RECORDS[1])
    log.close()
    assert read_step_log(tmp_path) == RECORDS[:2]


def test_a_flipped_byte_is_refused_naming_the_line(tmp_path: Path) -> None:
    path = tmp_path / "trained.jsonl"
    write_log(tmp_path, RECORDS)
    data = path.read_bytes()
    damaged = data.replace(b'"positions":[2,3]', b'"positions":[2,7]')
    assert damaged != data
    path.write_bytes(damaged)
    with pytest.raises(CorruptDataError, match=r"trained.jsonl:2: the checksum is .* expected"):
        StepLog(tmp_path)


def test_a_step_is_recorded_once(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    log.append(RECORDS[0])
    log.append(RECORDS[0])
    with pytest.raises(StorageError, match="step 0 of branch 'main' is recorded with version 1"):
        log.append(TrainedRecord("main", 0, 1, [5]))
    log.close()
    assert read_step_log(tmp_path) == RECORDS[:1]


def test_a_branch_never_trains_a_position_twice_but_another_branch_may(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    log.append(RECORDS[0])
    with pytest.raises(StorageError, match="position 1 was trained by step 0 of branch 'main'"):
        log.append(TrainedRecord("main", 1, 2, [1, 2]))
    with pytest.raises(StorageError, match="must be distinct"):
        log.append(TrainedRecord("main", 1, 2, [3, 3]))
    log.append(TrainedRecord("retry", 1, 2, [1, 2]))
    log.close()


def test_a_log_of_before_there_were_plans_is_read(tmp_path: Path) -> None:
    (tmp_path / "trained.jsonl").write_bytes(b'47c0a2d1 {"branch":"main","step":0,"version":1,"positions":[0,1]}\n')
    assert read_step_log(tmp_path) == RECORDS[:1]


def test_a_missing_log_is_empty(tmp_path: Path) -> None:
    assert read_step_log(tmp_path) == []


@pytest.mark.usefixtures("rotating")
def test_after_rotations_only_the_newest_file_is_read_and_it_says_the_same(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    for record in RECORDS:
        log.append(record)
        log.append_plan(plan(f"main/{record.step}", record.positions))
        log.rotate("main", log.trained_by("main"))
    log.close()
    for older in log_files(tmp_path)[:-1]:
        older.write_bytes(b"never read")
    reopened = StepLog(tmp_path)
    assert reopened.trained_by("main") == PositionRanges([(0, 5)])
    assert reopened.highest_version == 3
    assert reopened.records == []
    with pytest.raises(StorageError, match="position 1 was trained by an earlier step of branch 'main'"):
        reopened.append(TrainedRecord("main", 3, 4, [1]))
    reopened.append(TrainedRecord("main", 3, 2, [6]))
    assert reopened.trained_by("main") == PositionRanges([(0, 6)])
    assert reopened.trained_by("other") == PositionRanges()
    assert reopened.highest_version == 3
    reopened.close()


@pytest.mark.usefixtures("rotating")
def test_older_files_stay_and_tell_the_whole_history(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    for record in RECORDS:
        log.append(record)
        log.rotate("main", log.trained_by("main"))
    log.close()
    assert read_step_log(tmp_path) == RECORDS
    assert len(log_files(tmp_path)) == 4


@pytest.mark.usefixtures("rotating")
def test_steps_beyond_the_commit_are_taken_over(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    for record in RECORDS:
        log.append(record)
    log.rotate("main", PositionRanges([(0, 3)]))
    assert log.records == RECORDS[2:]
    assert log.trained_by("main") == PositionRanges([(0, 5)])
    log.close()


def test_a_small_log_is_not_rotated(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    log.append(RECORDS[0])
    log.rotate("main", log.trained_by("main"))
    log.close()
    assert len(log_files(tmp_path)) == 1
