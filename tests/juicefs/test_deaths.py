"""A stream over two clients while one after the other dies: nothing acknowledged is lost, nothing is trained twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from deploy.juicefs.processes import own_processes
from deploy.juicefs.services import GATEWAY, REDIS
from recovery.audit import AuditReport, audit_run
from storage.lock import CoordinatorLock
from storage.pool import Pool
from tests.juicefs.two_mounts import ROOT, TwoMounts
from tests.pipeline.mini_stream import BATCH, POINTS, ROLLOUTS
from vime.errors import CoordinatorBusyError, StorageError

pytestmark = [pytest.mark.juicefs, pytest.mark.slow, pytest.mark.timeout(300)]
STREAM = ROOT / "tests" / "pipeline" / "mini_stream.py"
DYING = ROOT / "tests" / "juicefs" / "dying_stream.py"
LOCK_FREED_S = 30.0
"""About 10 s with a heartbeat of 2 s; the default heartbeat needs a minute."""


def run_stream(volume: TwoMounts, folder: Path, point: str = "none", occurrence: int = 1) -> int:
    """A session that is killed at a point, or ends; its exit status."""
    words = [sys.executable, str(STREAM), str(folder), point, str(occurrence), "1000"]
    return subprocess.run(words, env=volume.environment(), check=False).returncode


def new_run(volume: TwoMounts) -> Path:
    folder = volume.new_folder()
    (folder / "training_log").mkdir()
    return folder


def assert_whole(report: AuditReport) -> None:
    """generated = trained + pending + in flight + dropped, and all that was wanted is trained, once."""
    parts = report.trained + report.pending + report.in_flight + sum(report.dropped.values())
    assert (report.identity_holds, report.generated) == (True, parts)
    assert (report.lost, report.trained_twice, report.trained) == ([], [], ROLLOUTS * BATCH)


@pytest.mark.parametrize("point", POINTS[:-1])
def test_coordinator_killed_at_any_step_goes_on_through_the_same_mount(volume: TwoMounts, point: str) -> None:
    folder = new_run(volume)
    assert run_stream(volume, folder, point, 2) == -signal.SIGKILL
    after_kill = audit_run(folder)
    assert (after_kill.identity_holds, after_kill.lost) == (True, [])
    assert run_stream(volume, folder) == 0
    assert_whole(audit_run(folder))


@contextmanager
def stream_in_a_write(volume: TwoMounts, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A session in the middle of its fourth publication; whoever has it says when it may go on."""
    words = [sys.executable, str(DYING), str(folder), "4"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=volume.environment(), stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as stream:
        try:
            assert hear(stream) == "writing"
            yield stream
        finally:
            stream.kill()


def hear(stream: subprocess.Popen[str]) -> str:
    """The next line of the stream."""
    assert stream.stdout is not None
    return stream.stdout.readline().strip()


def go_on(stream: subprocess.Popen[str]) -> None:
    assert stream.stdin is not None
    print(file=stream.stdin, flush=True)


def test_producers_client_killed_in_a_write_loses_nothing(volume: TwoMounts) -> None:
    folder = new_run(volume)
    with stream_in_a_write(volume, folder) as stream:
        volume.kill_client(volume.there)
        go_on(stream)
        assert hear(stream).startswith("failed ")
        in_between = audit_run(folder)
        volume.up()
        go_on(stream)
        assert hear(stream) == "done"
    assert (in_between.identity_holds, in_between.lost) == (True, [])
    assert_whole(audit_run(folder))


@pytest.mark.parametrize("part", [REDIS, GATEWAY])
def test_server_killed_in_a_write_and_started_again_loses_nothing(volume: TwoMounts, part: str) -> None:
    """The clients wait for the metadata engine or the object store, or fail; either way the stream ends whole."""
    folder = new_run(volume)
    with stream_in_a_write(volume, folder) as stream:
        for pid in own_processes(volume.folder, part):
            os.kill(pid, signal.SIGKILL)
        go_on(stream)
        volume.up()
        heard = hear(stream)
        if heard.startswith("failed "):
            go_on(stream)
            heard = hear(stream)
        assert heard == "done"
    assert_whole(audit_run(folder))


def test_what_was_published_through_a_client_that_died_is_read_through_the_other(volume: TwoMounts) -> None:
    folder = volume.new_folder()
    with Pool.create(folder / "pool", "run", profile="juicefs", declaration=volume.declaration) as pool:
        other = Pool.open(volume.at_peer(pool.root))
        refs = [other.publish_blob(bytes([number]) * 2**20, submission_id=str(number)) for number in range(8)]
        volume.kill_client(volume.there)
        with pytest.raises(StorageError):
            other.publish_blob(b"x", submission_id="lost")
        for number, ref in enumerate(refs):
            assert pool.read_blob(ref) == bytes([number]) * 2**20
        with suppress(StorageError):  # its files are those of a mount that is gone
            other.close()


def test_lock_of_a_dead_client_is_freed_within_half_a_minute(volume: TwoMounts) -> None:
    """The coordinator's client dies with the lock; a successor on the other client is let in and has the next epoch."""
    folder = volume.new_folder()
    hold = "import sys,time,pathlib; from storage.lock import CoordinatorLock as L;"
    hold += "L.acquire(pathlib.Path(sys.argv[1]), owner='first'); print('held', flush=True); time.sleep(600)"
    words = [sys.executable, "-c", hold, str(volume.at_peer(folder))]
    with subprocess.Popen(words, env=volume.environment(), stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        volume.kill_client(volume.there)
        died = time.monotonic()
        with pytest.raises(CoordinatorBusyError):
            CoordinatorLock.acquire(folder, owner="second")
        with acquire_in_time(folder, died + LOCK_FREED_S) as lock:
            assert lock.epoch == 2
        os.kill(holder.pid, signal.SIGKILL)


def test_run_whose_coordinators_client_died_goes_on_after_a_new_mount(volume: TwoMounts) -> None:
    folder = new_run(volume)
    assert run_stream(volume, folder, "plan", 3) == -signal.SIGKILL
    before = audit_run(folder)
    volume.kill_client(volume.here)
    volume.up()
    assert audit_run(folder) == before
    assert run_stream(volume, folder) == 0
    assert_whole(audit_run(folder))


def acquire_in_time(folder: Path, deadline: float) -> CoordinatorLock:
    while True:
        try:
            return CoordinatorLock.acquire(folder, owner="second")
        except CoordinatorBusyError:
            assert time.monotonic() < deadline, "the dead client's lock was not freed"
            time.sleep(0.25)
