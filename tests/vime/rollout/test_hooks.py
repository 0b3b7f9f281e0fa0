"""Hooks are imported as the run's processes would import them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vime.rollout.hooks import hook_problems, load_hook
from vime.settings.parse import parse_settings
from vime.settings.rules.problem import Problem


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "hooks_in_working_folder", raising=False)
    path = tmp_path / "hooks_in_working_folder.py"
    path.write_text("async def reward(args, sample): ...\nlogger = print\n")
    return path


def test_a_module_in_the_working_folder_is_found_and_the_search_path_stays(module: Path) -> None:
    before = list(sys.path)
    settings = parse_settings(["--custom-rm-path", f"{module.stem}.reward"])
    assert hook_problems(settings) == []
    assert sys.path == before


def test_every_hook_is_told_of_not_only_the_first(module: Path) -> None:
    words = ["--custom-rm-path", f"{module.stem}.absent", "--dynamic-sampling-filter-path", "nowhere.filter"]
    flags = [problem.flags for problem in hook_problems(parse_settings(words))]
    assert flags == [("--custom-rm-path",), ("--dynamic-sampling-filter-path",)]


def test_each_path_of_a_repeated_flag_is_checked(module: Path) -> None:
    words = ["--rollout-sample-hook-path", f"{module.stem}.reward", "--rollout-sample-hook-path", "nowhere.hook"]
    assert [problem.found.split(":")[0] for problem in hook_problems(parse_settings(words))] == [
        f"--rollout-sample-hook-path {module.stem}.reward can't be called as documented (got an unexpected keyword "
        "argument 'rollout_id')",
        "--rollout-sample-hook-path nowhere.hook",
    ]


def test_a_function_whose_arguments_cannot_be_known_is_taken(module: Path) -> None:
    module.write_text("build = dict\n")
    settings = parse_settings(["--custom-megatron-init-path", f"{module.stem}.build"])
    assert hook_problems(settings) == []


def test_paths_of_vime_itself_are_not_imported() -> None:
    words = ["--custom-tis-function-path", "vime.backends.megatron_utils.loss.icepop_function"]
    assert hook_problems(parse_settings(words)) == []


def test_loading_gives_the_function_or_the_problem() -> None:
    assert load_hook("--custom-rm-path", "json.dumps") is sys.modules["json"].dumps
    assert isinstance(load_hook("--custom-rm-path", "json.absent"), Problem)
