"""Every wrong input ends with exit status 1 and a message with flag, value, what is allowed and a next step."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.vime.settings.wrong_inputs import batching, files, hooks, keeping, learning, parsing, placement, right
from tests.vime.settings.wrong_inputs.case import Case
from vime.cli import train as train_command
from vime.cli.main import main
from vime.settings import validate as validation
from vime.settings.machine import Machine
from vime.settings.rules import FILE_RULES, MACHINE_RULES, RULES, score_centering

_TABLES: tuple[ModuleType, ...] = (parsing, placement, batching, learning, keeping, files, hooks)
CASES: tuple[Case, ...] = tuple(case for table in _TABLES for case in table.CASES)
_RULE_NAMES = [rule.__name__ for rule in (*RULES, *FILE_RULES, *MACHINE_RULES)]
_WITHOUT_CASE = {"gpus_exist", "the_rewards_library_is_installed", "the_sinks_library_is_installed"}
"""They depend on the machine; tests/vime/settings/rules has a file for each."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("wrong_hooks", "broken_hooks", "right_hooks"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def status_of(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    machine = Machine(nodes=None, vllm_version=case.vllm, environment=case.environment)
    monkeypatch.setattr(train_command, "this_machine", lambda: machine)
    monkeypatch.setattr("vime.cli.dry_run.dry_run", lambda *_: 0)  # the preview comes after the checks
    return main(["train", "--dry-run", *case.command(folder)])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_wrong_input_is_refused_with_what_is_allowed(
    case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(case, folder, monkeypatch) == 1
    said = capsys.readouterr().err
    found, allowed = (text.replace("$DIR", str(folder)) for text in (case.found, case.allowed))
    assert said.startswith("\nvime: ")
    assert found in said
    assert allowed in said[said.index(found) :]
    assert case.next_step in said[said.index("Next: ") :]


@pytest.mark.parametrize("case", [case for case in CASES if case.rule], ids=lambda case: case.name)
def test_without_its_rule_a_wrong_input_would_pass(
    case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disabled = (case.rule or "").split()
    for name in ("RULES", "FILE_RULES", "MACHINE_RULES"):
        kept = tuple(rule for rule in getattr(validation, name) if rule.__name__ not in disabled)
        monkeypatch.setattr(validation, name, kept)
    assert status_of(case, folder, monkeypatch) == 0, capsys.readouterr().err


def test_every_rule_has_a_wrong_input() -> None:
    covered = {name for case in CASES for name in (case.rule or "").split()[:1]}
    assert covered | _WITHOUT_CASE == set(_RULE_NAMES)


def test_every_exclusion_of_score_centering_has_a_wrong_input() -> None:
    given = {word for case in CASES if case.rule == "score_centering_stands_alone" for word in case.words.split()}
    assert set(score_centering.EXCLUDED) <= given


def test_there_are_no_two_equal_inputs() -> None:
    assert len({(case.words, case.leave_out, str(case.files), case.vllm, str(case.config)) for case in CASES}) == len(
        CASES
    )


@pytest.mark.parametrize("case", right.CASES, ids=lambda case: case.words or "as it is")
def test_what_can_work_is_let_through(
    case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(case, folder, monkeypatch) == 0, capsys.readouterr().err


def test_the_command_line_without_wrong_words_passes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(Case("", "", "", ""), folder, monkeypatch) == 0
    assert capsys.readouterr().err == ""
