"""`.ci/run` reports what `make test` said and leaves no environment behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
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


def run(clone: Path, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": path or os.environ["PATH"]}
    return subprocess.run(
        [clone / ".ci" / "run"], env=environment, capture_output=True, text=True, check=False, timeout=60
    )


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


def with_juicefs(clone: Path) -> None:
    (clone / "deploy" / "juicefs").mkdir(parents=True)
    (clone / "deploy" / "juicefs" / "up.sh").touch(mode=0o755)


def with_browser_tests(clone: Path) -> None:
    (clone / "tests" / "browser").mkdir(parents=True)


@pytest.mark.parametrize(
    ("prepare", "package"),
    [
        pytest.param(
            with_juicefs,
            "redis-server",
            marks=pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="/dev/fuse is missing"),
        ),
        (with_browser_tests, "chromium"),
    ],
)
@pytest.mark.parametrize(("user", "works"), [(0, True), (0, False), (1000, True)])
def test_root_of_a_bare_machine_gets_what_tests_would_be_skipped_without(
    clone: Path, user: int, works: bool, prepare: Callable[[Path], None], package: str
) -> None:
    write_test_target(clone, f"echo '{CLOSING}'")
    prepare(clone)
    tools = clone / "tools"
    tools.mkdir()
    for name in (
        "bash",
        "cat",
        "dirname",
        "echo",
        "env",
        "grep",
        "make",
        "mkdir",
        "mktemp",
        "rm",
        "sh",
        "tail",
        "tee",
        "timeout",
    ):
        (tools / name).symlink_to(str(shutil.which(name)))
    for name, script in (
        ("id", f"echo {user}"),
        ("apt-get", f'echo "$@" >>{clone}/asked; {"true" if works else "false"}'),
    ):
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    done = run(clone, str(tools))
    assert done.returncode == 0, done.stderr
    asked = (clone / "asked").read_text().splitlines() if (clone / "asked").exists() else []
    assert any("install" in line and line.endswith(package) for line in asked) is (user == 0)
    assert (f"{package} can't be installed" in done.stdout) is not works


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
