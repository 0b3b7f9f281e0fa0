"""A reward whose library is missing is refused before anything starts, with the command that installs it."""

from __future__ import annotations

import importlib.util

import pytest

from vime.settings.parse import parse_settings
from vime.settings.rules.problem import Problem
from vime.settings.rules.rollout import LIBRARIES, the_rewards_library_is_installed


def problems(*words: str) -> list[Problem]:
    return list(the_rewards_library_is_installed(parse_settings([*words])))


@pytest.mark.parametrize("name", ["ifbench", "boxed_ifbench", "reasoning_gym"])
def test_a_missing_library_is_named_with_its_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    (problem,) = problems("--rm-type", name)
    package = LIBRARIES[name.removeprefix("boxed_")][1]
    assert str(problem).startswith(f"--rm-type {name}: the package {package} is not installed")
    assert problem.next_step == f'Install it: pip install "{package}".'


@pytest.mark.parametrize("words", ["--rm-type math", "--rm-type ifbench --custom-rm-path a.b", ""])
def test_other_rewards_need_none(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert problems(*words.split()) == []


def test_an_installed_library_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    assert problems("--rm-type", "ifbench") == []
