"""A kept engine outlives who started it, is found again, and ends when nobody wants it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vime.backends.vllm_utils.kept import Keeping, KeptEngine
from vime.backends.vllm_utils.lease import (
    Claim,
    LeaseWatch,
    claim_path,
    end_claimed,
    outlives_driver,
    remove_claim,
    write_claim,
    write_lease,
)
from vime.backends.vllm_utils.supervisor import descendants, start_time

SLEEP = "import time; time.sleep(600)"


def start(folder: Path, program: str = SLEEP, **settings: str) -> KeptEngine:
    return KeptEngine.start(
        Keeping(folder, "engine_0", "nightly"),
        [sys.executable, "-c", program],
        {"GIVEN": "1"},
        folder / "engine_0.log",
        stop_grace_s=1.0,
        address=("127.0.0.1", 4000),
        settings=settings,
    )


def wait_for(condition: Callable[[], object], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def child_of(engine: KeptEngine) -> int:
    wait_for(lambda: descendants(engine.pid))
    return descendants(engine.pid)[0]


LAUNCHER = """
import sys, time
from pathlib import Path
from tests.vime.backends.vllm_utils.test_kept_engine import start
print(start(Path(sys.argv[1]), seed="3").pid, flush=True)
time.sleep(600)
"""


def test_it_outlives_a_killed_launcher_and_is_found_with_what_it_was_started_from(tmp_path: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pid = int(launcher.stdout.readline())
    launcher.kill()
    launcher.wait()
    found = KeptEngine.find(Keeping(tmp_path, "engine_0", "nightly"))
    assert found is not None
    child = child_of(found)
    assert (found.pid, found.poll(), found.claim.port) == (pid, None, 4000)
    assert outlives_driver(child)
    assert found.differences({"seed": "3"}) == []
    assert found.differences({"seed": "4", "dtype": "half"}) == ["dtype was not set, is half", "seed was 3, is 4"]
    found.stop()
    assert (start_time(pid), start_time(child)) == (None, None)
    assert KeptEngine.find(Keeping(tmp_path, "engine_0", "nightly")) is None
    assert not claim_path(tmp_path, "engine_0").exists()
    found.stop()


def test_it_ends_when_its_lease_is_not_renewed(tmp_path: Path) -> None:
    write_lease(tmp_path, "1", 1.0)
    engine = start(tmp_path)
    child = child_of(engine)
    wait_for(lambda: engine.poll() is not None)
    assert start_time(child) is None
    assert "no driver has renewed its lease for 1 s" in (tmp_path / "engine_0.log").read_text()


def test_it_ends_when_its_claim_is_removed_or_another_engine_has_it(tmp_path: Path) -> None:
    first = start(tmp_path)
    second = start(tmp_path)
    wait_for(lambda: first.poll() is not None)
    assert second.poll() is None
    first.stop()
    assert second.poll() is None, "the claim is not the first one's any more"
    child = child_of(second)
    remove_claim(claim_path(tmp_path, "engine_0"))
    wait_for(lambda: second.poll() is not None)
    assert start_time(child) is None


def test_the_status_of_one_that_ends_by_itself_or_whose_supervisor_is_killed_is_told(tmp_path: Path) -> None:
    engine = start(tmp_path, "raise SystemExit(3)")
    wait_for(lambda: engine.poll() is not None)
    assert engine.poll() == 3
    engine = start(tmp_path)
    child = child_of(engine)
    subprocess.run(["kill", "-9", str(engine.pid)], check=True)
    wait_for(lambda: engine.poll() is not None and start_time(child) is None)
    assert engine.poll() == 137


def test_an_engine_of_another_machine_is_not_found_and_not_killed_by_its_number(tmp_path: Path) -> None:
    engine = start(tmp_path)
    path = claim_path(tmp_path, "engine_0")
    write_claim(path, replace(engine.claim, place="elsewhere"))
    assert KeptEngine.find(Keeping(tmp_path, "engine_0", "nightly")) is None
    end_claimed(path)
    assert not path.exists()
    wait_for(lambda: engine.poll() is not None)


def test_a_lease_counts_from_the_moment_at_which_it_was_seen_to_change(
    tmp_path: Path,
) -> None:
    now = [100.0]
    path = claim_path(tmp_path, "engine_0")
    write_claim(path, Claim("a", "127.0.0.1", 1, "here", 1.0, "", {}))
    watch = LeaseWatch(path, "a", lambda: now[0])
    assert watch.why_end() is None, "there is no lease yet"
    write_lease(tmp_path, "1", 10.0)
    assert watch.why_end() is None
    now[0] += 9
    assert watch.why_end() is None
    write_lease(tmp_path, "2", 20.0)
    assert watch.why_end() is None
    now[0] += 19
    assert watch.why_end() is None
    path.write_text("{")
    assert watch.why_end() is None, "a claim that can't be read says nothing"
    now[0] += 2
    assert watch.why_end() == "no driver has renewed its lease for 20 s"
