"""What a killed driver leaves is ended; what isn't its own is left alone."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline import guard

LINGERS = "100"
"""When a process began that is still there."""
DRIVER = """
import subprocess, sys, time
from pathlib import Path
from pipeline.guard import guarded
with guarded(Path(sys.argv[1]), grace_s=0.5):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print(child.pid, flush=True)
    if sys.argv[2] == "stay":
        time.sleep(600)
    time.sleep(1.0)  # the guard looks twice a second
    if sys.argv[2] == "leave":
        child.kill()
        child.wait()
"""


def start(code: str, folder: Path, *words: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    """A driver that runs this code, and the process whose id it prints."""
    driver = subprocess.Popen([sys.executable, "-c", code, str(folder), *words], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    return driver, psutil.Process(int(driver.stdout.readline()))


def start_driver(folder: Path, how: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    folder.mkdir()
    return start(DRIVER, folder, how)


def test_children_of_a_killed_driver_end_and_its_folder_goes(tmp_path: Path) -> None:
    driver, child = start_driver(tmp_path / "ray", "stay")
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        (beside,) = [p for p in psutil.Process(driver.pid).children() if p.pid != child.pid]
        time.sleep(1.0)  # the guard looks twice a second
        driver.kill()
        driver.wait()
        gone, alive = psutil.wait_procs([child, beside], timeout=8)
        assert alive == []
        assert len(gone) == 2
        assert not (tmp_path / "ray").exists()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_killed_process_is_waited_for_until_the_kernel_has_ended_it(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([LINGERS, LINGERS, LINGERS, None])
    killed: list[int] = []
    monkeypatch.setattr(guard, "start_time", lambda _pid: next(looks))
    monkeypatch.setattr(os, "kill", lambda pid, _number: killed.append(pid))
    guard.kill_and_wait({4: LINGERS})
    assert killed == [4]
    assert next(looks, "none is left") == "none is left"


def test_a_process_that_can_not_be_ended_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "KILLED_S", 0.2)
    monkeypatch.setattr(guard, "start_time", lambda _pid: LINGERS)
    monkeypatch.setattr(os, "kill", lambda _pid, _number: None)
    guard.kill_and_wait({4: LINGERS})


def test_a_process_that_outlives_its_session_is_ended(tmp_path: Path) -> None:
    driver, child = start_driver(tmp_path / "ray", "forget")
    assert driver.wait(20) == 0
    assert psutil.wait_procs([child], timeout=2)[1] == []
    assert not (tmp_path / "ray").exists()


KEPT = """
import os, subprocess, sys, time
from pathlib import Path
from pipeline.guard import guarded
with guarded(Path(sys.argv[1]), grace_s=20.0):
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    kept = subprocess.Popen(sleep, start_new_session=True, env=os.environ | {"VIME_ENGINE_OUTLIVES_DRIVER": "1"})
    print(kept.pid, flush=True)
    time.sleep(1.0)  # the guard looks twice a second
"""


def test_an_engine_that_outlives_its_driver_is_left_alone_and_not_waited_for(tmp_path: Path) -> None:
    driver, kept = start(KEPT, tmp_path / "ray")
    try:
        assert driver.wait(15) == 0
        assert kept.status() != psutil.STATUS_ZOMBIE
    finally:
        kept.kill()


AGENT = """
import subprocess, sys, time
from pathlib import Path
from pipeline.guard import guarded
with guarded(Path(sys.argv[1]), grace_s=60.0):
    sleep = "import time; time.sleep(600)"
    agent = subprocess.Popen(["ray::DashboardAgent", "-c", sleep], executable=sys.executable, start_new_session=True)
    print(agent.pid, flush=True)
    time.sleep(1.0)  # the guard looks twice a second
"""


def test_agents_of_ray_that_are_left_alone_get_no_time(tmp_path: Path) -> None:
    driver, agent = start(AGENT, tmp_path / "ray")
    assert driver.wait(30) == 0, "it would take a minute"
    assert not psutil.pid_exists(agent.pid) or agent.status() == psutil.STATUS_ZOMBIE


def test_a_driver_that_ends_takes_its_guard_with_it(tmp_path: Path) -> None:
    driver, _ = start_driver(tmp_path / "ray", "leave")
    assert driver.wait(20) == 0
    time.sleep(0.2)
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in (p.info["cmdline"] or [])]
