"""Files and folders that a flag names for what is written."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.cluster import Cluster
from recovery.run_location import RunLocation, RunSettings
from vime import outputs
from vime.cli import replay as replay_command
from vime.cli.main import main
from vime.errors import DiskFullError, SettingsError, StorageError, VimeError
from vime.settings.placement import Demand
from vime.view.run_watch import read_once
from vime.view.server import watching

NOWHERE = Path("/proc/nope/out")
"""Not even root can make it."""


@pytest.mark.parametrize(
    ("number", "kind", "next_step"),
    [
        (errno.ENOENT, SettingsError, "Name a place in a folder that exists."),
        (errno.EACCES, SettingsError, "Name a place where you may write, or change its permissions."),
        (errno.EISDIR, SettingsError, "Name a file, not a folder."),
        (errno.EROFS, SettingsError, "Name a place on a file system that can be written."),
        (errno.ENOSPC, DiskFullError, "Free space, or name a place on another file system."),
        (errno.EIO, SettingsError, "Name another place."),
    ],
)
def test_the_next_step_fits_what_is_in_the_way(number: int, kind: type[VimeError], next_step: str) -> None:
    error = outputs.output_error("--output", Path("a.html"), OSError(number, os.strerror(number)))
    assert type(error) is kind
    assert error.message == f"--output a.html can't be written: {os.strerror(number)}."
    assert error.next_step == next_step


def test_a_folder_that_may_not_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs.os, "access", lambda *_: False)
    with pytest.raises(SettingsError, match=rf"--scratch {tmp_path} can't be written: Permission denied"):
        outputs.empty_output_folder("--scratch", tmp_path)


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file"):
        with pytest.raises(SettingsError, match=f"--scratch {place} is not an empty folder"):
            outputs.empty_output_folder("--scratch", place)
    with pytest.raises(SettingsError, match="can't be written: Not a directory"):
        outputs.empty_output_folder("--scratch", tmp_path / "file" / "below")


@pytest.fixture
def without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """No temporary folder can be made."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(outputs.tempfile, "tempdir", str(NOWHERE))


def start_a_cluster() -> None:
    with Cluster(Demand((1,), (1,)), 1):
        pass


def watch_runs() -> None:
    with watching([]):
        pass


@pytest.mark.usefixtures("without_room")
@pytest.mark.parametrize(
    "use",
    [lambda: outputs.temporary_folder("vime-"), start_a_cluster, watch_runs, lambda: read_once(a_run())],
    ids=["any command", "a run's cluster", "vime view", "vime report"],
)
def test_no_place_for_temporary_files_names_the_variable(use: Callable[[], object]) -> None:
    with pytest.raises(StorageError, match=r"No folder for temporary files can be made: .*Set TMPDIR to a folder"):
        use()


def a_run() -> RunLocation:
    return RunLocation(Path("run"), Path("run"), RunSettings())


def test_a_passing_folder_is_gone_with_what_is_in_it_whatever_happens() -> None:
    with outputs.passing_folder("vime-") as folder:
        (folder / "part").mkdir()
    assert not folder.exists()
    with pytest.raises(KeyError), outputs.passing_folder("vime-") as folder:
        raise KeyError
    assert not folder.exists()


@pytest.fixture
def without_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands find a run, whatever they are given."""
    monkeypatch.setattr(replay_command, "run_of", lambda _: None)
    monkeypatch.setattr(replay_command, "read_source", lambda *_: None)
    monkeypatch.setattr("vime.cli.report.locate_run", lambda *_, **__: None)
    monkeypatch.setattr("vime.view.report.report_html", lambda _: "<html>")
    no_letters = SimpleNamespace(letters=[])
    monkeypatch.setattr("vime.cli.queue.run_of", lambda *_, **__: SimpleNamespace(has_queue=False))
    monkeypatch.setattr("vime.cli.queue.list_dead", lambda *_, **__: no_letters)


@pytest.mark.usefixtures("without_runs")
@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("replay RUN --rollout 0", "--scratch"),
        ("report RUN", "--output"),
        ("queue dead RUN", "--export"),
        ("demo", "--output"),
        ("import-script SCRIPT", "--output"),
    ],
)
def test_every_command_names_its_flag_where_it_cannot_write(
    words: str, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python3 train.py --lr 1e-4\n")
    given = words.replace("SCRIPT", str(script)).split()
    assert main([*given, flag, str(NOWHERE)]) == 1
    said = capsys.readouterr().err
    assert f"{flag} {NOWHERE} can't be written: " in said
    assert "Next: Name a place" in said
