"""A sink whose library is missing is refused at the start."""

from __future__ import annotations

import importlib.util

import pytest

from vime.settings.parse import parse_settings
from vime.settings.rules.metrics_out import the_sinks_library_is_installed


@pytest.mark.parametrize(("flag", "package"), [("--use-wandb", "wandb"), ("--use-tensorboard", "tensorboardX")])
def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, flag: str, package: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else object())
    (problem,) = the_sinks_library_is_installed(parse_settings(["--use-wandb", "--use-tensorboard"]))
    assert f"{flag}: the package {package} is not installed" in str(problem)
    assert f'pip install "{package}"' in problem.next_step


def test_a_library_that_nothing_asks_for_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert list(the_sinks_library_is_installed(parse_settings([]))) == []
