"""What outlives the sessions of a campaign: processes fork from a server, which isn't one of theirs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.chaos.processes import KEPT_TITLE, MARK_VARIABLE, MarkedProcesses
from benchmarks.chaos.standing import MODULES, ForkedDriver, Forks

WAIT_S = 30.0


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[Forks]:
    forks = Forks(tmp_path / "fork", [], {**os.environ, MARK_VARIABLE: str(tmp_path)})
    yield forks
    forks.close()


def rehearsal(forks: Forks, folder: Path, how: str) -> ForkedDriver:
    command = [sys.executable, "-m", "tests.benchmarks.kill_rehearsal", str(folder / "run"), how]
    return forks.start(command, folder / "log", dict(os.environ))


def until(folder: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not (folder / "run" / "metrics.jsonl").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_fork_runs_the_module_it_was_asked_for_and_its_end_is_told(forks: Forks, tmp_path: Path) -> None:
    assert rehearsal(forks, tmp_path, "short").wait(WAIT_S) == 3
    driver = rehearsal(forks, tmp_path, "well")
    until(tmp_path)
    assert driver.poll() is None
    driver.kill()
    assert driver.wait(WAIT_S) == -signal.SIGKILL


def test_an_interrupt_of_a_forks_group_reaches_it_and_not_the_server(forks: Forks, tmp_path: Path) -> None:
    driver = rehearsal(forks, tmp_path, "well")
    until(tmp_path)
    os.killpg(driver.pid, signal.SIGINT)
    assert driver.wait(WAIT_S) == 0
    assert rehearsal(forks, tmp_path, "short").wait(WAIT_S) == 3


def test_a_session_is_what_the_server_forked_and_not_the_server_or_the_cluster(forks: Forks, tmp_path: Path) -> None:
    environment = {**os.environ, MARK_VARIABLE: str(tmp_path)}
    parent = [sys.executable, "-c", "import subprocess as s; print(s.Popen(['sleep', '60']).pid, flush=True); input()"]
    cluster = subprocess.Popen(parent, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert cluster.stdout is not None
    below = int(cluster.stdout.readline())
    try:
        marked = MarkedProcesses(str(tmp_path))
        assert {process.pid for process in marked.alive()} >= {cluster.pid, below, forks.pid}
        marked = MarkedProcesses(str(tmp_path))
        marked.leave_out(cluster=cluster.pid, server=forks.pid)
        assert marked.alive() == []
        driver = rehearsal(forks, tmp_path, "well")
        until(tmp_path)
        found = marked.alive()
        assert found[0].pid == driver.pid
        assert [process.ppid() for process in found[1:]] == [driver.pid], "and its worker"
        marked.end()
        assert driver.wait(WAIT_S) == -signal.SIGKILL
    finally:
        os.kill(below, signal.SIGKILL)
        cluster.communicate()


def test_what_the_server_imports_doesnt_import_ray() -> None:
    code = (
        f"import sys, importlib; [importlib.import_module(name) for name in {MODULES}]; sys.exit('ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_engines_that_may_outlive_their_session_are_told_apart_with_all_below_them(tmp_path: Path) -> None:
    environment = {**os.environ, MARK_VARIABLE: str(tmp_path)}
    code = "import subprocess as s; print(s.Popen(['sleep', '60']).pid, flush=True); input()"
    with (
        subprocess.Popen(["sleep", "60"], env=environment) as other,
        subprocess.Popen(
            [sys.executable, "-c", code, KEPT_TITLE],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as kept,
    ):
        assert kept.stdout is not None
        below = int(kept.stdout.readline())
        marked = MarkedProcesses(str(tmp_path))
        assert {process.pid for process in marked.alive()} == {other.pid, kept.pid, below}
        assert marked.end_besides_kept() == [f"{other.pid} sleep 60"]
        assert {process.pid for process in marked.alive()} == {kept.pid, below}
        marked.end()
