"""The queue's own tests, with every pool on one mount and every payload published through the other."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.juicefs.two_mounts import ROOT, TwoMounts

pytestmark = [pytest.mark.juicefs, pytest.mark.slow, pytest.mark.timeout(600)]
MIN_TESTS = 150
OFF_THE_MOUNT = ["--ignore", "tests/storage/test_queue_schedules.py"]
"""It makes its pools by the hundred, in temporary folders of its own."""


def test_queue_tests_pass_on_the_mount(volume: TwoMounts) -> None:
    folder = volume.here / "tests"
    words = ["-m", "pytest", "tests/storage", "-m", "not slow", "-q", "--basetemp", str(folder), "--timeout", "120"]
    words += OFF_THE_MOUNT
    done = subprocess.run(
        [sys.executable, *words, "-p", "no:cacheprovider"],
        env=volume.environment(), cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(done.stdout[-4000:])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    passed = int(done.stdout.splitlines()[-1].split(" passed")[0].split()[-1])
    assert passed > MIN_TESTS
