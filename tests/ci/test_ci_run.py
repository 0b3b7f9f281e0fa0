"""`.ci/run` reports what `make test` said and leaves no environment behind."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLOSING = "========= 3 passed, 1 deselected in 1.20s ========="


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    return tmp_path


def write_test_target(clone: Path, *commands: str) -> None:
    """Make `make test` create .venv and run `commands`."""
    lines = ["test:", "\t@mkdir -p .venv", *(f"\t@{command}" for command in commands)]
    (clone / "Makefile").write_text("\n".join(lines) + "\n")


def run(clone: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([clone / ".ci" / "run"], capture_output=True, text=True, check=False, timeout=60)


def test_success_ends_with_the_closing_line_of_pytest(clone: Path) -> None:
    write_test_target(clone, f"echo '{CLOSING}'", "echo more")
    done = run(clone)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == CLOSING
    assert not (clone / ".venv").exists()


def test_failure_is_passed_on_and_cleaned_up(clone: Path) -> None:
    write_test_target(clone, "echo '=== 1 failed, 2 passed in 65.01s (0:01:05) ==='", "exit 1")
    done = run(clone)
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1] == "=== 1 failed, 2 passed in 65.01s (0:01:05) ==="
    assert not (clone / ".venv").exists()


def test_a_stop_before_pytest_is_said(clone: Path) -> None:
    write_test_target(clone, "echo lint found something; exit 1")
    done = run(clone)
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1] == "make test stopped before pytest finished (status 2)"


def test_the_tests_see_ci_and_no_standard_input(clone: Path) -> None:
    write_test_target(clone, 'echo "CI is $$CI, input is <$$(cat)>"')
    assert "CI is true, input is <>" in run(clone).stdout


def test_an_environment_that_was_there_before_is_kept(clone: Path) -> None:
    write_test_target(clone, "true")
    (clone / ".venv").mkdir()
    run(clone)
    assert (clone / ".venv").exists()


def test_termination_stops_the_tests_and_cleans_up(clone: Path) -> None:
    write_test_target(clone, "touch started; sleep 60; touch finished")
    process = subprocess.Popen([clone / ".ci" / "run"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not (clone / "started").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 143
    finally:
        process.kill()
        process.wait()
    assert not (clone / ".venv").exists()
    assert not (clone / "finished").exists()
