from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from storage.lock import CoordinatorLock
from vime.errors import CoordinatorBusyError, StorageError

HOLD = """
import sys, time, pathlib
from storage.lock import CoordinatorLock
lock = CoordinatorLock.acquire(pathlib.Path(sys.argv[1]), owner="run-7")
print(lock.epoch, flush=True)
time.sleep(60)
"""


def test_another_process_is_refused_until_the_holder_dies(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "1\n"
        with pytest.raises(CoordinatorBusyError) as refusal:
            CoordinatorLock.acquire(tmp_path, owner="second")
        text = str(refusal.value)
        assert f"the holder is 'run-7', process {holder.pid} on host " in text
        assert "(epoch 1)" in text
        assert "Stop that process first" in text
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with CoordinatorLock.acquire(tmp_path, owner="second") as lock:
        assert lock.epoch == 2


def test_epochs_only_grow(tmp_path: Path) -> None:
    epochs = []
    for _ in range(3):
        with CoordinatorLock.acquire(tmp_path, owner="x") as lock:
            epochs.append(lock.epoch)
            assert lock.still_mine()
    assert epochs == [1, 2, 3]
    assert [path.name for path in (tmp_path / "epochs").iterdir()] == ["00000003.json"]


def test_an_epoch_file_that_a_crash_left_empty_still_counts(tmp_path: Path) -> None:
    (tmp_path / "epochs").mkdir()
    (tmp_path / "epochs" / "00000004.json").touch()
    with CoordinatorLock.acquire(tmp_path, owner="x") as lock:
        assert lock.epoch == 5


def test_a_replaced_holder_notices_even_where_flock_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.lock.fcntl.flock", lambda *_: None)
    locks = [CoordinatorLock.acquire(tmp_path, owner=f"holder {number}") for number in range(3)]
    assert [lock.still_mine() for lock in locks] == [False, False, True]
    with pytest.raises(CoordinatorBusyError, match=r"epoch 1 of the queue in .* has ended: the holder is 'holder 2'"):
        locks[0].check()
    for lock in locks:
        lock.release()


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOLCK])
def test_a_file_system_that_cannot_lock_is_named(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("storage.lock.fcntl.flock", fail)
    with pytest.raises(StorageError, match=rf"coordinator.lock: the file system can't lock: .* \(errno {number}\)"):
        CoordinatorLock.acquire(tmp_path, owner="x")


def test_a_released_lock_is_no_longer_ours(tmp_path: Path) -> None:
    lock = CoordinatorLock.acquire(tmp_path, owner="x")
    lock.release()
    lock.release()
    assert not lock.still_mine()
    with pytest.raises(StorageError, match="was released"):
        lock.check()


def test_a_successor_is_seen_before_it_has_cleared_older_epochs(tmp_path: Path) -> None:
    with CoordinatorLock.acquire(tmp_path, owner="x") as lock:
        (tmp_path / "epochs" / "00000002.json").touch()
        assert not lock.still_mine()
