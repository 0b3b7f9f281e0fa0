"""Every error has its exit status, in one table that the help and the docs show."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from vime import errors
from vime.cli import main as cli
from vime.cli.exit_codes import EXIT_CODES, ExitCode, exit_code
from vime.data.record_files import BadRecord

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.SettingsError("x"), 1),
        (errors.DataError("x"), 1),
        (errors.RestoreError("x"), 1),
        (errors.ModelError("x"), 1),
        (errors.VersionMismatchError("x"), 2),
        (errors.EngineStartError("x"), 2),
        (errors.StorageError("x"), 2),
        (errors.CorruptDataError("x"), 2),
        (errors.CoordinatorBusyError("x"), 2),
        (errors.BadRecordError("x"), 3),
        (BadRecord("x"), 3),
        (errors.RewardError("x"), 3),
        (errors.TooManyFailuresError("x"), 3),
        (errors.RunFailedError("x"), 4),
        (errors.TrainerError("x"), 4),
        (errors.PublicationError("x"), 4),
        (errors.StaleLeaseError("x"), 4),
        (ValueError("x"), 4),
        (errors.StalledError("x"), 5),
        (KeyboardInterrupt(), 130),
    ],
)
def test_error_has_its_exit_status(error: BaseException, code: int) -> None:
    assert exit_code(error) == code


def test_every_error_of_vime_is_decided_by_itself_or_a_base_of_vime() -> None:
    own = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.VimeError)]
    decided = tuple(kind for kind in EXIT_CODES if kind is not Exception)
    undecided = [kind.__name__ for kind in own if kind is not errors.VimeError and not issubclass(kind, decided)]
    assert undecided == []


def test_the_docs_hold_the_same_table() -> None:
    page = (ROOT / "docs" / "exit_codes.md").read_text()
    rows = {int(code): words for code, words in re.findall(r"^\| (\d+) \| (.*?) \|", page, re.MULTILINE)}
    assert rows == {code.value: code.words for code in ExitCode}


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"]])
def test_help_ends_with_the_table(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert all(f"  {code.value:<4} {code.words}" in out for code in ExitCode)


@pytest.mark.parametrize(
    ("words", "also"),
    [("view", set()), ("convert", set()), ("demo", set()), ("import-script", set()), ("audit", {6}), ("replay", {6})],
)
def test_help_of_a_command_wraps_its_text_and_lists_the_statuses_that_it_has(
    words: str, also: set[int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([words, "--help"]) == 0
    text, endings = capsys.readouterr().out.split("exit status:\n")
    assert {int(code) for code in re.findall(r"^  (\d+) ", endings, re.MULTILINE)} == {0, 1, 2, 4} | also
    assert max(map(len, text.split("examples:")[0].splitlines())) < 80


@pytest.mark.parametrize("words", [["nonsense"], ["audit", "--nonsense"], ["train", "stray"], ["doctor", "--lr", "x"]])
def test_wrong_usage_is_the_users(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 1
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "group", "near"),
    [
        ("queue stats RUN", "vime queue", "status"),
        ("sample tracer RUN", "vime sample", "trace"),
        ("trian", "vime", "train"),
    ],
)
def test_an_unknown_command_is_told_with_the_nearest_one(
    words: str, group: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words.split()) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"{group}: unknown command ")
    assert first.endswith(f". The nearest one is {near}.")
    assert second.endswith(f"`{group} --help` lists the commands.")


@pytest.mark.parametrize(
    ("word", "step"),
    [
        ("frobnicate", "`vime --help` lists the commands."),
        ("resume", "Run the same `vime train` command again: it goes on with the run in --save."),
    ],
)
def test_no_command_is_named_that_is_not_similar(word: str, step: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([word]) == 1
    assert capsys.readouterr().err == f"vime: unknown command {word!r}.\n      Next: {step}\n"


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"vime \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_unexpected_exception_leaves_its_trace_in_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def breaks(_words: list[str]) -> int:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(cli, "_train", breaks)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cli.main(["train"]) == 4
    shown = capsys.readouterr().err
    assert "Unexpected ZeroDivisionError at test_exit_codes.py:" in shown
    assert "Traceback" not in shown
    (trace,) = tmp_path.glob("vime-trace-*.txt")
    assert f"Trace: {trace}" in shown
    assert "ZeroDivisionError: by nothing" in trace.read_text()


def test_command_of_the_shell_ends_with_the_status() -> None:
    done = subprocess.run([sys.executable, "-m", "vime", "nonsense"], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 1
