"""`vime audit`: what it prints, and the status that it ends with."""

import json
import os
from pathlib import Path

import pytest

from pipeline.run_folder import RunFolder
from pipeline.session_lock import session_lock
from recovery.audit_parts import AuditReport
from recovery.run_location import RunLocation, RunSettings
from tests.support.eventful_run import make_run
from vime.cli.main import main


def found(monkeypatch: pytest.MonkeyPatch, *, lost: int, twice: int = 0) -> None:
    """An audit that finds this many faults."""
    report = AuditReport(1, 1, 0, 0, {}, 0, [f"group {n}: lost" for n in range(lost)], ["sample 0: twice"] * twice)
    monkeypatch.setattr("vime.cli.audit.audit_run", lambda _run, _pool: report)
    monkeypatch.setattr("vime.cli.audit.locate_run", lambda *_, **__: RunLocation(Path(), Path(), RunSettings()))


def test_a_sound_run_ends_with_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", monkeypatch)
    assert main(["audit", str(run)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["lost"], report["trained_twice"], report["dropped"]) == ([], [], {"reward_raised": 1})


def test_a_live_run_is_counted_with_a_warning_beside_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", monkeypatch)
    assert main(["audit", str(run)]) == 0
    assert "warning" not in capsys.readouterr().err
    with session_lock(RunFolder(run, run / "rollout_data" / "pool")):
        assert main(["audit", str(run)]) == 0
    printed = capsys.readouterr()
    assert f"warning: {run}: another session is running there (process {os.getpid()})." in printed.err
    assert json.loads(printed.out)["lost"] == []


@pytest.mark.parametrize(("lost", "twice"), [(1, 0), (0, 1)])
def test_losses_end_with_a_status_of_their_own(lost: int, twice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, lost=lost, twice=twice)
    assert main(["audit", "runs/a"]) == 6


def test_long_lists_are_cut_and_say_how_much_they_hide(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found(monkeypatch, lost=4000)
    assert main(["audit", "runs/a"]) == 6
    lost = json.loads(capsys.readouterr().out)["lost"]
    assert (len(lost), lost[0], lost[-1]) == (21, "group 0: lost", "and 3980 more")
    main(["audit", "runs/a", "--limit", "4000"])
    assert len(json.loads(capsys.readouterr().out)["lost"]) == 4000


def test_a_folder_that_is_no_run_is_told_as_queue_status_tells_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        assert main(["audit", str(folder)]) == 1
        audited = capsys.readouterr().err
        assert main(["queue", "status", str(folder)]) == 1
        assert audited == capsys.readouterr().err


def test_help_has_an_example_and_the_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "  vime audit runs/a\n" in printed
    assert "  6    `vime audit` found groups" in printed
