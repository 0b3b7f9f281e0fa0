"""The process between launcher and engine, with harmless programs in place of an engine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

from vime.backends.vllm_utils.supervisor import descendants, mapped_segments, unlink_listed


def supervisor(folder: Path) -> list[str]:
    return [sys.executable, "-m", "vime.backends.vllm_utils.supervisor", "0.5", str(folder / "ledger")]


# An "engine" that ignores SIGTERM, with a child in another session and a shared-memory segment left behind.
ENGINE = """
import mmap, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
file = open("/dev/shm/" + sys.argv[2], "w+b")
file.truncate(4096)
segment = mmap.mmap(file.fileno(), 4096)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: object, seconds: float = 10.0) -> bool:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())


def started(tmp_path: Path, launcher: list[str]) -> tuple[subprocess.Popen[bytes], list[int], Path]:
    """The launcher, all processes below it, and the segment's path, once the engine is complete."""
    mark, segment = tmp_path / "child", f"vime_test_{os.getpid()}_{time.monotonic_ns()}"
    process = subprocess.Popen([*launcher, sys.executable, "-c", ENGINE, str(mark), segment])
    assert wait_until(lambda: mark.exists() and mark.read_text())
    return process, descendants(process.pid), Path("/dev/shm") / segment


def test_a_stop_ends_everything_and_removes_the_segment(tmp_path: Path) -> None:
    process, pids, segment = started(tmp_path, supervisor(tmp_path))
    assert len(pids) == 2
    assert segment.exists()
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert not any(alive(pid) for pid in pids)
    assert not segment.exists()


def test_a_ledger_that_can_not_be_written_ends_no_engine(tmp_path: Path) -> None:
    process, pids, segment = started(tmp_path, supervisor(tmp_path / "gone"))
    time.sleep(1.3)  # segments are looked for once a second
    assert all(alive(pid) for pid in pids)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert not segment.exists()


def test_a_killed_launcher_takes_everything_with_it(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.Popen(sys.argv[1:]).wait()"
    process, pids, segment = started(tmp_path, [sys.executable, "-c", code, *supervisor(tmp_path)])
    assert len(pids) == 3
    process.kill()
    process.wait()
    assert wait_until(lambda: not any(alive(pid) for pid in pids))
    assert not segment.exists()


def test_a_killed_engine_takes_its_children_with_it_and_its_status_is_passed_on(tmp_path: Path) -> None:
    process, pids, segment = started(tmp_path, supervisor(tmp_path))
    time.sleep(1.3)  # segments are looked for once a second
    os.kill(pids[0], signal.SIGKILL)
    assert process.wait(10) == 128 + signal.SIGKILL
    assert not any(alive(pid) for pid in pids)
    assert not segment.exists()


def test_a_killed_supervisor_takes_the_engine_with_it(tmp_path: Path) -> None:
    process, pids, segment = started(tmp_path, supervisor(tmp_path))
    assert wait_until(lambda: (tmp_path / "ledger").exists())
    process.kill()
    process.wait()
    assert wait_until(lambda: not alive(pids[0]))
    for pid in pids[1:]:  # a real engine's children carry vime's plug-in, which ties them to their parent
        os.kill(pid, signal.SIGKILL)
    assert segment.exists()
    unlink_listed(tmp_path / "ledger")  # what the next engine's start does
    assert not segment.exists()
    assert not (tmp_path / "ledger").exists()


def test_the_engines_own_status_is_passed_on(tmp_path: Path) -> None:
    done = subprocess.run([*supervisor(tmp_path), sys.executable, "-c", "raise SystemExit(3)"], check=False, timeout=20)
    assert done.returncode == 3


def test_a_named_semaphore_is_found_under_its_real_name() -> None:
    lock = multiprocessing.get_context("spawn").Lock()
    name = lock._semlock.name  # type: ignore[attr-defined]
    assert f"/dev/shm/sem.{name.lstrip('/')}" in mapped_segments([os.getpid()])


def test_mapped_segments_are_found() -> None:
    segment = shared_memory.SharedMemory(create=True, size=4096)
    try:
        assert f"/dev/shm/{segment.name}" in mapped_segments([os.getpid()])
    finally:
        segment.close()
        segment.unlink()
