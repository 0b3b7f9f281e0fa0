from __future__ import annotations

from pathlib import Path

import pytest

from storage.trained_log import TrainedLog, TrainedRecord, read_trained_log
from vime.errors import CorruptDataError, StorageError

RECORDS = [TrainedRecord("main", step, step + 1, [2 * step, 2 * step + 1]) for step in range(3)]


def write_log(path: Path, records: list[TrainedRecord]) -> None:
    log = TrainedLog(path)
    for record in records:
        log.append(record)
    log.close()


def test_a_log_cut_at_any_byte_holds_the_records_before_it_and_goes_on(tmp_path: Path) -> None:
    write_log(tmp_path / "whole", RECORDS)
    data = (tmp_path / "whole").read_bytes()
    path = tmp_path / "log"
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        whole = data[:length].count(b"\n")
        assert read_trained_log(path) == RECORDS[:whole]
        write_log(path, RECORDS[whole:])
        assert path.read_bytes() == data


def test_a_zero_filled_tail_is_a_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write_log(path, RECORDS[:2])
    with path.open("ab") as stream:
        stream.write(bytes(4096))
    write_log(path, RECORDS[2:])
    assert read_trained_log(path) == RECORDS


def test_a_flipped_byte_is_refused_naming_the_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write_log(path, RECORDS)
    data = path.read_bytes()
    damaged = data.replace(b'"positions":[2,3]', b'"positions":[2,7]')
    assert damaged != data
    path.write_bytes(damaged)
    with pytest.raises(CorruptDataError, match=r"log:2: the checksum is .* expected"):
        TrainedLog(path)


def test_a_step_is_recorded_once(tmp_path: Path) -> None:
    log = TrainedLog(tmp_path / "log")
    log.append(RECORDS[0])
    log.append(RECORDS[0])
    with pytest.raises(StorageError, match="step 0 of branch 'main' is recorded with version 1"):
        log.append(TrainedRecord("main", 0, 1, [5]))
    log.close()
    assert read_trained_log(tmp_path / "log") == RECORDS[:1]


def test_a_branch_never_trains_a_position_twice_but_another_branch_may(tmp_path: Path) -> None:
    log = TrainedLog(tmp_path / "log")
    log.append(RECORDS[0])
    with pytest.raises(StorageError, match="position 1 was trained by step 0 of branch 'main'"):
        log.append(TrainedRecord("main", 1, 2, [1, 2]))
    with pytest.raises(StorageError, match="must be distinct"):
        log.append(TrainedRecord("main", 1, 2, [3, 3]))
    log.append(TrainedRecord("retry", 1, 2, [1, 2]))
    log.close()


def test_a_missing_log_is_empty(tmp_path: Path) -> None:
    assert read_trained_log(tmp_path / "log") == []
