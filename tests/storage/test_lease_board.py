"""Ages of leases for people who look in."""

from pathlib import Path

import pytest

from storage.lease_board import LeaseBoard, LeaseTimes, read_lease_times
from storage.refs import lease_from_bytes
from tests.storage.queue_helpers import new_queue


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def leases(folder: Path, count: int) -> list[bytes]:
    pool, queue = new_queue(folder / "pool", count)
    with pool, queue:
        return [group.lease for group in queue.lease("worker", count)]


def attempt(lease: bytes) -> str:
    return lease_from_bytes(lease).attempt_id


def test_the_file_tells_when_each_lease_began_and_was_extended(tmp_path: Path) -> None:
    first, second = leases(tmp_path, 2)
    clock = Clock()
    board = LeaseBoard(tmp_path, clock)
    board.leased([first])
    clock.now_s = 1005.0
    board.leased([second])
    board.extended([first])
    board.write_if_due()
    assert read_lease_times(tmp_path) == {
        attempt(first): LeaseTimes(1000.0, 1005.0),
        attempt(second): LeaseTimes(1005.0, 1005.0),
    }
    board.ended(first)
    clock.now_s = 1010.0
    board.write_if_due()
    assert read_lease_times(tmp_path).keys() == {attempt(second)}


def test_it_is_written_at_most_once_a_second_and_only_when_something_changed(tmp_path: Path) -> None:
    first, second = leases(tmp_path, 2)
    clock = Clock()
    board = LeaseBoard(tmp_path, clock)
    board.write_if_due()
    assert not (tmp_path / "lease_times.json").exists()
    board.leased([first])
    board.write_if_due()
    clock.now_s += 0.5
    board.leased([second])
    board.write_if_due()
    assert read_lease_times(tmp_path).keys() == {attempt(first)}
    clock.now_s += 0.5
    board.write_if_due()
    assert read_lease_times(tmp_path).keys() == {attempt(first), attempt(second)}


def test_a_board_that_cannot_be_written_or_read_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (lease,) = leases(tmp_path, 1)
    board = LeaseBoard(tmp_path / "missing")
    board.leased([lease])
    board.write_if_due()
    assert "can't be written" in caplog.text
    assert read_lease_times(tmp_path / "missing") == {}
    (tmp_path / "lease_times.json").write_text('{"a": ')
    assert read_lease_times(tmp_path) == {}
