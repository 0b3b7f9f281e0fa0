"""Flags of a user's own Megatron, through a provider that travels as its import path."""

import argparse
import json
from pathlib import Path

import pytest

from vime.errors import SettingsError
from vime.settings import extra_args
from vime.settings.groups import Settings
from vime.settings.parse import HookArgs
from vime.settings.resolve import resolve

PROVIDER = """
def extra_args_provider(parser):
    parser.add_argument("--my-moe-tweak", type=float, default=0.5)
    parser.add_argument("--eps-clipp", action="store_true")
    return parser

def takes_a_name_of_vime(parser):
    parser.add_argument("--rollout-batch-size", type=int)
    return parser

def forgets_to_return(parser):
    parser.add_argument("--other-tweak")

not_a_function = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"my_megatron_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(PROVIDER)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def given(path: str, *words: str) -> Settings:
    return resolve(["--extra-args-provider-path", path, *words]).settings


def test_flags_of_the_provider_are_passed_on_even_when_they_look_like_misspelt_ones_of_vime(module: str) -> None:
    settings = given(f"{module}.extra_args_provider", "--my-moe-tweak", "0.1", "--eps-clipp", "--lr", "1e-5")
    assert settings.megatron_args == ("--my-moe-tweak", "0.1", "--eps-clipp")
    assert settings.trainer.lr == 1e-5
    with pytest.raises(SettingsError, match="--eps-clipp is not a flag; the nearest one is --eps-clip"):
        resolve(["--eps-clipp"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("takes_a_name_of_vime", "adds --rollout-batch-size, which is a flag of vime"),
        ("forgets_to_return", "it returns NoneType, allowed: the parser"),
        ("not_a_function", "has no function 'not_a_function'"),
        ("absent", "has no function 'absent'"),
    ],
)
def test_a_provider_that_cannot_work_is_refused(module: str, name: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        given(f"{module}.{name}")
    assert caught.value.next_step


def test_a_module_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(SettingsError, match=r"--extra-args-provider-path nowhere_at_all\.f: No module named"):
        given("nowhere_at_all.f")


def test_a_function_gives_its_import_path_and_others_are_refused(module: str) -> None:
    provider = extra_args.load(f"{module}.extra_args_provider")
    assert extra_args.path_of(provider) == f"{module}.extra_args_provider"

    def local(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return parser

    with pytest.raises(SettingsError, match="allowed: a function at the top level of a module"):
        extra_args.path_of(local)


def test_args_has_megatrons_names_and_asks_for_them_only_when_one_is_used(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    asked = []

    def megatron() -> dict[str, object]:
        asked.append(True)
        return {"tensor_model_parallel_size": 2, "lr": 0.5}

    args = HookArgs(resolve(["--lr", "1e-5"]).settings, megatron, {"tensor_model_parallel_size", "lr"})
    assert args.lr == 1e-5
    with pytest.raises(AttributeError, match="has no 'nope'"):
        _ = args.nope
    assert asked == []
    assert args.tensor_model_parallel_size == 2
    assert args.lr == 1e-5
    assert args.tensor_model_parallel_size == 2
    assert len(asked) == 1
