"""`vime ... | head`: the command ends without a word, with one status for all commands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline.preview.planned import write_job
from tests.support.eventful_run import make_run

ROOT = Path(__file__).resolve().parents[3]


def run_unread(words: list[str], temporary: Path, *, both: bool = False) -> tuple[int, str]:
    """Run with a standard output whose reader is gone, with `both` the standard error too; status and errors."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, *words], cwd=ROOT, stdout=writer, stderr=subprocess.STDOUT if both else subprocess.PIPE,
            text=True, check=False, env={**os.environ, "TMPDIR": str(temporary)},
        )  # fmt: skip
    finally:
        os.close(writer)
    return done.returncode, done.stderr or ""


@pytest.mark.parametrize(
    "words", ["--help", "queue --help", "queue status --help", "train --help", "queue status RUN", "audit RUN",
              "queue tasks RUN --json", "sample trace RUN 18", "train --dry-run --json JOB"],
)  # fmt: skip
def test_a_reader_that_goes_away_ends_a_command_quietly(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = ["-m", "vime", *words.split()]
    if "RUN" in command:
        command[command.index("RUN")] = str(make_run(tmp_path / "run", monkeypatch))
    if "JOB" in command:
        command[-1:] = [*write_job(tmp_path), "--actor-num-gpus-per-node", "1", "--assume-gpus", "2"]
    assert run_unread(command, temporary) == (141, "")
    assert not list(temporary.glob("vime-trace-*"))


def test_a_complaint_that_nobody_reads_ends_quietly_too(tmp_path: Path) -> None:
    assert run_unread(["-m", "vime", "queue", "status", str(tmp_path)], tmp_path, both=True)[0] == 141


def test_the_script_ends_as_the_command_does(tmp_path: Path) -> None:
    words = ["train.py", "--dry-run", *write_job(tmp_path), "--actor-num-gpus-per-node", "1", "--assume-gpus", "2"]
    assert run_unread(words, tmp_path) == (141, "")
